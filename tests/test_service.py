"""ExpertParallel in one process: where it may run, what it refuses, and the fields of its handles. The exchange between
ranks: tests/distributed."""

from __future__ import annotations

import errno
import os
import random
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import alone
from torch._subclasses.fake_tensor import FakeTensorMode

import epmoe
from epmoe.native.arguments import check_tensor
from epmoe.native.layouts import place
from epmoe.rail.opening import check_shared_memory


def test_one_process_is_a_group_of_one():
    with epmoe.ExpertParallel(alone()) as ep:
        assert (ep.rank, ep.size, ep.num_local_experts, ep.device.type) == (0, 1, 8, "cpu")
        x = torch.randn(3, 64)
        d = ep.dispatch(x, torch.tensor([[0, 1], [2, 2], [7, -1]]), torch.ones(3, 2))
        assert torch.equal(ep.combine(d.rows, d), x * torch.tensor([[2.0], [2.0], [1.0]]))
    with pytest.raises(RuntimeError, match="this ExpertParallel is closed"):
        ep.health()


@pytest.mark.usefixtures("serving")
def test_models_may_be_built_under_a_default_device():
    x, *weights = torch.randn(3, 64), torch.randn(8, 64), torch.randn(8, 80, 64), torch.randn(8, 64, 40)

    def built() -> epmoe.MoELayer:
        return epmoe.MoELayer.from_full(epmoe.ExpertParallel(alone()), *weights, batch_invariant=True)

    with torch.device("meta"):
        layer = built()
        layer.ep.resume()
    with layer.ep, (usual := built()).ep:
        assert torch.equal(layer(x), usual(x))


def test_a_backward_pass_that_needs_rows_of_an_earlier_round_raises():
    """`d.rows` is a window: saved for a backward pass, it would hold the rows of another layer by then."""
    w = torch.randn(64, requires_grad=True)
    with epmoe.ExpertParallel(alone()) as ep:
        for _ in range(2):
            d = ep.dispatch(torch.randn(3, 64), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
            loss = (d.rows * w).sum()
            ep.combine(d.rows, d)
        loss.backward()  # of the last round
        loss = (d.rows * w).sum()
        ep.combine(d.rows, ep.dispatch(torch.randn(3, 64), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("x", [torch.randn(1 + 2 * 64)[1:].view(2, 64), torch.randn(3, 65)[:1, :64]])
def test_rows_may_start_anywhere(x):
    """Rows that are contiguous but do not start at multiples of 16 bytes."""
    with epmoe.ExpertParallel(alone()) as ep:
        d = ep.dispatch(x, torch.zeros(len(x), 1, dtype=torch.int32), torch.ones(len(x), 1))
        assert torch.equal(ep.combine(d.rows, d), x)


def test_a_single_row_may_have_any_stride():
    with epmoe.ExpertParallel(alone()) as ep:
        x = torch.randn(2, 65)[:1, :64]
        d = ep.dispatch(x, torch.zeros(2, 3, dtype=torch.int32)[:1, :1], torch.ones(2, 5)[:1, :1])
        assert torch.equal(ep.combine(d.rows, d), x)


def test_ids_of_no_token_may_have_any_strides():
    with epmoe.ExpertParallel(alone()) as ep:
        no_ids, no_weights = torch.empty(2, 0, dtype=torch.int32).t(), torch.empty(2, 0).t()
        d = ep.dispatch(torch.empty(64, 0).t(), no_ids, no_weights)
        assert ep.combine(d.rows, d).shape == (0, 64)


@pytest.mark.parametrize("step", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_no_tokens_may_lie_apart_within_a_row(step):
    """torch calls a tensor of 0 rows contiguous, whatever the stride within a row."""
    dtypes, lengths = (torch.float32, torch.int32, torch.float32), (64, 2, 2)
    with epmoe.ExpertParallel(alone()) as ep:
        for _ in range(2):  # the second call finds its template
            sliced = (
                torch.empty(0, n * s, dtype=dtype)[:, ::s] for n, s, dtype in zip(lengths, step, dtypes, strict=True)
            )
            d = ep.dispatch(*sliced)
            assert ep.combine(d.rows, d).shape == (0, 64)


def test_too_few_expert_rows():
    with epmoe.ExpertParallel(alone()) as ep:
        x = torch.randn(3, 64)
        d = ep.dispatch(x, torch.tensor([[0, 1], [2, 2], [7, -1]]), torch.ones(3, 2))
        with pytest.raises(ValueError, match="`expert_rows` must hold at least 5 rows, got 4"):
            ep.combine(d.rows[:4], d)
        assert torch.equal(ep.combine(d.rows[:5], d), x * torch.tensor([[2.0], [2.0], [1.0]]))


T, K, D, M = 5, 4, 64, 16
X, IDS, WEIGHTS = torch.zeros(T, D), torch.zeros(T, K, dtype=torch.int32), torch.ones(T, K)
TOO_MANY = {"x": torch.zeros(M + 3, D), "ids": IDS.new_zeros(M + 3, K), "weights": torch.ones(M + 3, K)}
IDS_OF_5 = r"`ids` must be int32 or int64 \[5, K\], got"


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": X.double()}, TypeError, r"`x` must be .*float32.* \[T, D\], got float64 \[5, 64\]"),
        ({"x": X.int()}, TypeError, r"`x` must be .*float32.* \[T, D\], got int32 \[5, 64\]"),
        ({"x": X[0]}, ValueError, r"`x` must be .* \[T, D\], got float32 \[64\]"),
        ({"x": torch.zeros(T, 128)}, ValueError, r"`x` must be float32 \[T, 64\].*, got float32 \[5, 128\]"),
        ({"x": X[:, :63]}, ValueError, r"`x` must be float32 \[T, 64\].*16 bytes, got float32 \[5, 63\]"),
        ({"x": X.clone().requires_grad_()}, RuntimeError, r"forward only.*torch\.inference_mode"),
        ({"x": X.to("meta")}, ValueError, "`x` must be on cpu, got meta"),
        ({"x": X.numpy()}, TypeError, "`x` must be .*, got ndarray"),
        ({"ids": IDS[:4]}, ValueError, rf"{IDS_OF_5} int32 \[4, 4\]"),
        ({"ids": IDS[0]}, ValueError, rf"{IDS_OF_5} int32 \[4\]"),
        ({"ids": IDS.repeat(1, 2)}, ValueError, r"`ids` must be int32 or int64 \[5, 1\.\.4\], got int32 \[5, 8\]"),
        ({"ids": WEIGHTS, "weights": IDS}, TypeError, rf"{IDS_OF_5} float32 \[5, 4\]"),
        ({"ids": IDS.short()}, TypeError, rf"{IDS_OF_5} int16 \[5, 4\]"),
        ({"weights": WEIGHTS[:, :3]}, ValueError, r"`weights` must be .* \[5, 4\], got float32 \[5, 3\]"),
        ({"weights": WEIGHTS.double()}, TypeError, r"`weights` must be .* \[5, 4\], got float64 \[5, 4\]"),
        ({"weights": WEIGHTS.to("meta")}, ValueError, "`weights` must be on cpu, got meta"),
        ({"weights": WEIGHTS.flatten()}, ValueError, r"`weights` must be .* \[5, 4\]"),
        ({"weights": None}, TypeError, "`weights` must be .*, got NoneType"),
        ({"layout": "token"}, ValueError, r"`layout` must be 'expert' or 'rank', got 'token'"),
        ({"num_tokens": 2.0}, TypeError, r"`num_tokens` must be an int or .*, got float"),
        ({"num_tokens": torch.ones(2)}, TypeError, r"`num_tokens` must be int32 \[1\], got float32 \[2\]"),
        (TOO_MANY, ValueError, r"19 tokens, but capacity\.max_num_tokens_per_rank is 16: set it to at least 19"),
    ],
)
def test_a_wrong_call_is_refused(changed, error, message):
    """Twice: a call like one that has passed skips most checks, but none that could still fail."""
    with epmoe.ExpertParallel(alone(top_k=K, max_tokens=M)) as ep:
        for _ in range(2):
            with pytest.raises(error, match=message):
                ep.dispatch(**{"x": X, "ids": IDS, "weights": WEIGHTS} | changed)
            d = ep.dispatch(X, IDS, WEIGHTS)
            with pytest.raises(RuntimeError, match="round . is still open"):
                ep.dispatch(X, IDS, WEIGHTS)
            ep.combine(d.rows, d)


def test_rows_of_the_shape_that_dispatch_returned_are_still_checked():
    with epmoe.ExpertParallel(alone()) as ep:
        x = torch.randn(3, 64)
        d = ep.dispatch(x, torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
        for bad, error, message in [
            (d.rows.double(), TypeError, r"`expert_rows` must be float32 \[N, 64\], got float64"),
            (d.rows[:, :32], ValueError, r"`expert_rows` must be float32 \[N, 64\], got float32"),
            (d.rows[0], ValueError, r"`expert_rows` must be float32 \[N, 64\], got float32 \[64\]"),
            (d.rows.to("meta"), ValueError, "`expert_rows` must be on cpu, got meta"),
            (d.rows.clone().requires_grad_(), RuntimeError, "forward only"),
            (d.rows.numpy(), TypeError, "`expert_rows` must be .*, got ndarray"),
        ]:
            with pytest.raises(error, match=message):
                ep.combine(bad, d)
        unaligned = torch.empty(d.rows.numel() + 1)[1:].view_as(d.rows).copy_(d.rows)
        assert torch.equal(ep.combine(unaligned, d), x)


CONFIG = alone()
ON_THE_CPU, BY_NVLINK = (alone(exchange={"transport": transport}) for transport in ("shared_memory", "nvlink"))
IS_A_PATH = "`config` must be an EPConfig or the path of its file, got"
IS_A_GROUP = "`group` must be a process group of torch.distributed, got"
NO_MEMBER = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to other processes


@pytest.mark.parametrize(
    ("config", "arguments", "error", "message"),
    [
        (CONFIG.model_dump(), {}, TypeError, rf"{IS_A_PATH} dict: use EPConfig\(\*\*config\)"),
        (None, {}, TypeError, f"{IS_A_PATH} NoneType"),
        (CONFIG.model, {}, TypeError, f"{IS_A_PATH} ModelConfig"),
        (CONFIG, {"group": "cpu"}, TypeError, f"{IS_A_GROUP} str"),
        (CONFIG, {"group": [0]}, TypeError, f"{IS_A_GROUP} list"),
        (CONFIG, {"group": NO_MEMBER}, ValueError, "this process is no member of `group`"),
        (CONFIG, {"device": "gpu"}, ValueError, "`device` must be cpu or cuda with .*='auto', got gpu"),
        (CONFIG, {"device": {"type": "cpu"}}, TypeError, "`device` must be a torch.device or its name, got dict"),
        (ON_THE_CPU, {"device": "cuda"}, ValueError, "`device` must be cpu with .*'shared_memory', got cuda"),
        (BY_NVLINK, {"device": "cpu"}, ValueError, "`device` must be cuda with exchange.transport='nvlink', got cpu"),
        (alone(64, topology={"ep_size": 33}), {"device": "cuda"}, ValueError, "ep_size` must be at most 32 on GPUs"),
        (alone(experts=64, top_k=33), {"device": "cuda"}, ValueError, "per_tok` must be at most 32 on GPUs, got 33"),
        (alone(topology={"ep_size": 2}), {}, ValueError, "equal the size of the group, 1, got 2; torch.distributed is"),
    ],
)
def test_wrong_arguments_of_the_constructor(config, arguments, error, message):
    with pytest.raises(error, match=message):
        epmoe.ExpertParallel(config, **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu():
    with pytest.raises(ValueError, match="torch finds no GPU here"):
        epmoe.ExpertParallel(alone(exchange={"transport": "nvlink"}))


def test_another_gpu_is_another_device():
    with FakeTensorMode():
        x = torch.empty(2, 64, device="cuda:1")
    with pytest.raises(ValueError, match="`x` must be on cuda:0, got cuda:1"):
        check_tensor("x", x, (torch.float32,), ("T", "D"), torch.device("cuda:0"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_the_current_one():
    with torch.cuda.device(0), epmoe.ExpertParallel(alone(), device="cuda:1") as ep:
        x, ids, weights = (t.to("cuda:1") for t in (torch.randn(2, 64), torch.tensor([[0], [1]]), torch.ones(2, 1)))
        d = ep.dispatch(x, ids, weights)
        assert torch.equal(ep.combine(d.rows, d), x)
        with pytest.raises(ValueError, match="`ids` must be on cuda:1, got cuda:0"):
            ep.dispatch(x, ids.to("cuda:0"), weights)


def test_usable_outside_the_inference_mode_it_was_made_in():
    with torch.inference_mode():
        ep = epmoe.ExpertParallel(alone())
    x = torch.randn(2, 64)
    d = ep.dispatch(x, torch.tensor([[0], [1]]), torch.ones(2, 1))
    assert torch.equal(ep.combine(d.rows, d), x)
    ep.close()


class Interrupted(Exception):
    """What a signal handler raises."""


def test_a_signal_at_the_edge_of_a_turn_does_not_leave_it_held():
    """Anywhere in a call that does nothing."""

    def handler(*_: object) -> None:
        raise Interrupted

    before, draw, interrupted = signal.signal(signal.SIGALRM, handler), random.Random(0), 0
    with epmoe.ExpertParallel(alone()) as ep:
        for _ in range(10_000):
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 3e-5))
                    ep.alone(int)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                interrupted += 1
                assert ep.exchange.thread == 0
    signal.signal(signal.SIGALRM, before)
    assert interrupted > 100


def timeout_s(ep: epmoe.ExpertParallel, layout: str) -> float:
    """How long the operators of a round wait, by its descriptor."""
    d = ep.dispatch(torch.zeros(1, 64), torch.tensor([[0]]), torch.ones(1, 1), layout=layout)
    ep.abort(d)
    return d.sent.descriptor[place("ExchangeDescriptor", "timeout_ns")].item() / 1e9


def test_only_the_first_round_waits_for_ranks_that_still_load():
    with epmoe.ExpertParallel(alone()) as ep:
        first, later = ep.config.exchange.warmup_timeout_s, ep.config.exchange.timeout_s
        with torch.inference_mode():  # a descriptor made in it must change outside, too
            assert timeout_s(ep, "expert") == first > later
        for layout in ("expert", "rank", "expert"):  # the first has a descriptor already, the second needs another
            assert timeout_s(ep, layout) == later


@pytest.mark.parametrize(
    "experts, kib, fits", [(256, 227, True), (3584, 163, True), (256, 99, True), (3584, 99, False), (8, 64, False)]
)
def test_a_block_needs_shared_memory(monkeypatch, experts, kib, fits):
    properties = SimpleNamespace(shared_memory_per_block_optin=kib << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    config = epmoe.EPConfig(
        model={"num_experts": experts, "num_experts_per_tok": 2, "hidden_size": 256}, topology={"ep_size": 8}
    )
    check = partial(check_shared_memory, config, config.place_experts(), torch.device("cuda", 0))
    if fits:
        check()
        return
    with pytest.raises(ValueError, match=rf"a block at most {kib} KiB .* {experts} physical experts over 8 ranks"):
        check()


def test_fp8_travels_in_whole_blocks():
    with epmoe.ExpertParallel(alone(4, hidden=256, exchange={"combine_payload": "fp8"})) as ep:
        ids, weights = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
        with pytest.raises(ValueError, match=r"`x` must be .*whole blocks of 128, got float32 \[2, 192\]"):
            ep.dispatch(torch.randn(2, 192), ids, weights)
        d = ep.dispatch(x := torch.randn(2, 128), ids, weights)
        assert torch.allclose(ep.combine(d.rows, d), x, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("payload", ["auto", "fp8"])
def test_fields_by_layout(payload):
    """A field of the other layout raises by name; `scales` is None without an fp8 payload."""
    fields = {"rows", "scales", "expert_offsets", "tokens_per_expert"}, {"x", "scales", "ids", "weights"}
    inputs = torch.randn(2, 128), torch.tensor([[0], [1]]), torch.ones(2, 1)
    with epmoe.ExpertParallel(alone(hidden=128, exchange={"payload": payload})) as ep:
        for layout, here in (("expert", 0), ("rank", 1)):
            d = ep.dispatch(*inputs, layout=layout)
            handles = d, d.recv
            owner, absent = ("dispatched", "recv")[1 - here], handles[1 - here]
            assert all(hasattr(handles[here], name) for name in fields[here])
            scales = handles[here].scales
            if payload == "fp8":
                assert (scales.dtype, scales.shape[-1]) == (torch.float32, 1)
            else:
                assert scales is None
            for name in fields[1 - here]:
                with pytest.raises(AttributeError, match=f"`{owner}.{name}` does not exist with layout='{layout}'"):
                    getattr(absent, name)
            with pytest.raises(AttributeError, match="^row$"):
                _ = d.row
            assert d.recv.counts.tolist() == [2]
            ep.abort(d)


def test_too_few_files(monkeypatch):
    def memfd_create(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    with pytest.raises(RuntimeError, match=r"may not open more files \(its limit is \d+\).*ulimit -n"):
        epmoe.ExpertParallel(alone())
