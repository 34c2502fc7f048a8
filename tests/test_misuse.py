"""What a new user gets wrong: each mistake is one sentence that says what it must be, before anything is sent."""

from __future__ import annotations

import copy
import io
import pickle
import re
import threading
import time

import pytest
import torch
from helpers import alone, distinct_ids, full_layer, randn

import epmoe
from epmoe.exchange.round_state import RoundState
from epmoe.native import ops

pytestmark = pytest.mark.usefixtures("serving")

E, D, K, M = 12, 64, 3, 16
CONFIG = alone(E, K, D, max_tokens=M)


@pytest.fixture
def ep():
    with epmoe.ExpertParallel(CONFIG) as ep:
        yield ep


def inputs(T: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return randn(T, D), distinct_ids(T, E, K), torch.full((T, K), 1 / K)


def assert_works(ep: epmoe.ExpertParallel) -> None:
    """Nothing was sent: the next round is complete."""
    x, ids, weights = inputs()
    d = ep.dispatch(x, ids, weights)
    torch.testing.assert_close(ep.combine(d.rows, d), x)


@pytest.mark.parametrize(
    ("logits", "error", "message"),
    [  # 16 columns for 12 experts would give ids 12 to 15, which dispatch takes for "no expert": zeros in y
        (torch.zeros(5, 16), ValueError, r"`logits` must be .* \[T, 12\], got float32 \[5, 16\]"),
        (torch.zeros(12), ValueError, r"`logits` must be .* \[T, 12\], got float32 \[12\]"),
        (torch.zeros(5, 12, device="meta"), ValueError, "`logits` must be on cpu, got meta"),
        ([[0.0] * 12], TypeError, r"`logits` must be .* \[T, 12\], got list"),
    ],
)
def test_wrong_logits(ep, logits, error, message):
    with pytest.raises(error, match=message):
        ep.route(logits)


def test_rows_and_handle_in_the_wrong_order(ep):
    d = ep.dispatch(*inputs())
    for call in ("combine", "combine_send", "combine_partial"):
        hint = rf"`dispatched` must be what dispatch returned, got float32 \[.*\]: {call} takes the rows first"
        with pytest.raises(TypeError, match=hint):
            getattr(ep, call)(d, d.rows)
    for call in ("combine", "combine_send"):
        with pytest.raises(TypeError, match=r"`expert_rows` must be float32 \[N, 64\], got Dispatched"):
            getattr(ep, call)(d, d)
    ep.combine(d.rows, d)
    assert_works(ep)


@pytest.mark.parametrize("wrong", [None, "round 1", torch.zeros(3), inputs()])
def test_something_else_for_a_handle(ep, wrong):
    sent = ep.dispatch_send(*inputs())
    with pytest.raises(TypeError, match="`sent` must be what dispatch_send returned, got "):
        ep.dispatch_recv(wrong)
    d = ep.dispatch_recv(sent)
    with pytest.raises(TypeError, match="`dispatched` must be what dispatch returned, got "):
        ep.combine(d.rows, wrong)
    ep.combine_send(d.rows, d)
    with pytest.raises(TypeError, match="`dispatched` must be what dispatch returned, got "):
        ep.combine_recv(wrong)
    ep.combine_recv(d)
    assert_works(ep)


@pytest.mark.parametrize("as_path", [False, True])
def test_a_path_for_a_config(tmp_path, as_path):
    path = tmp_path / "one.json"
    path.write_text(CONFIG.model_dump_json(exclude_none=True))
    with epmoe.ExpertParallel(path if as_path else str(path)) as ep:
        assert ep.config == CONFIG
        assert_works(ep)
    with pytest.raises(epmoe.ConfigError, match="missing.yaml: no such configuration file"):
        epmoe.ExpertParallel(tmp_path / "missing.yaml" if as_path else str(tmp_path / "missing.yaml"))


@pytest.mark.parametrize("launched", ["1", "2"])
def test_a_group_of_one_under_a_launcher_of_several(launched, monkeypatch, recwarn):
    """torchrun without init_process_group."""
    monkeypatch.setenv("WORLD_SIZE", launched)
    epmoe.ExpertParallel(CONFIG).close()
    assert ["no experts are spread" in str(each.message) for each in recwarn] == [True] * (launched == "2")


def test_a_permutation_that_is_none():
    with pytest.raises(TypeError, match=r"`permuted` must be what permute returned, got float32 \[5, 3\]"):
        epmoe.finalize(randn(5, D), torch.ones(5, 3), None)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: epmoe.route(x, 2),
        lambda x: epmoe.route(x.detach(), 2, bias=x[0]),
        epmoe.quantize_fp8,
        lambda x: epmoe.zero_padding_rows_(x.clone(), 2),
    ],
)
def test_what_requires_grad_is_refused(call):
    """These stages have no backward. Without the error, router or x would silently get no gradient."""
    x = randn(4, 128).requires_grad_()
    with torch.enable_grad(), pytest.raises(RuntimeError, match=r"forward only.*requires grad.*torch\.inference_mode"):
        call(x)
    with torch.no_grad():
        call(x)


def test_repr_of_results_says_shapes():
    """Values would have to be fetched from the device."""
    x, ids, weights = inputs()
    assert repr(epmoe.Routing(ids, weights)) == "Routing(ids int32 [5, 3], weights float32 [5, 3])"
    assert repr(epmoe.quantize_fp8(x)) == "Quantized(q float8_e4m3fn [5, 64], scales float32 [5, 1])"
    tables = "expert_offsets int32 [13], tokens_per_expert int32 [12], row_of_pair int32 [5, 3], counts None"
    permuted = epmoe.permute(x, ids, torch.arange(E, dtype=torch.int32), E)
    assert repr(permuted) == f"Permuted(rows float32 [15, 64], {tables})"


def test_repr_of_an_expert_parallel_and_its_handles(ep):
    """Each says the state of its round, and shapes: values would have to be fetched from the device."""
    of_ep, of_round = "rank 0 of 1, E=12 K=3 D=64 float32, M=16, cpu", "T=5, D=64 float32, layout='expert'"
    assert repr(ep) == f"ExpertParallel({of_ep}, round 0 closed)"
    sent = ep.dispatch_send(*inputs())
    assert repr(sent) == f"Sent(rank 0, round 1 awaits dispatch_recv, {of_round})"
    d, state = ep.dispatch_recv(sent), "round 1 awaits combine or combine_partial or combine_send"
    assert repr(ep) == f"ExpertParallel({of_ep}, {state})"
    rows = "rows float32 [48, 64], scales None, expert_offsets int32 [13], tokens_per_expert int32 [12]"
    assert repr(d) == f"Dispatched(rank 0, {state}, {of_round}, {rows})"
    assert repr(d.recv) == "Received(counts int32 [1])"
    ep.combine(d.rows, d)
    later = ep.dispatch(*inputs(), layout="rank")
    assert repr(d).startswith("Dispatched(rank 0, round 1 closed, T=5,")
    slabs = "counts int32 [1], x float32 [1, 16, 64], scales None, ids int32 [1, 16, 3], weights float32 [1, 16, 3]"
    assert repr(later).endswith(f"layout='rank', recv Received({slabs}))")
    ep.close()
    assert repr(ep) == f"ExpertParallel({of_ep}, closed)"
    assert repr(later).startswith("Dispatched(rank 0, round 2 released, T=5,")


@pytest.mark.parametrize(
    "copies", [pickle.dumps, copy.deepcopy, copy.copy, lambda value: torch.save(value, io.BytesIO())]
)
def test_what_holds_windows_cannot_be_pickled_or_copied(ep, copies):
    sent = ep.dispatch_send(*inputs())
    d = ep.dispatch_recv(sent)
    for value in (ep, sent, d, d.recv):
        name = type(value).__name__
        want = f"{name} cannot be pickled or copied: it holds windows of this process; each process makes its own"
        with pytest.raises(TypeError, match=want):
            copies(value)
    ep.combine(d.rows, d)
    assert_works(ep)


def test_a_second_thread_in_a_call(ep, monkeypatch):
    """Calls of one `ExpertParallel` from several threads must be ordered; every one that is not is refused."""
    inside, go_on = threading.Event(), threading.Event()
    dispatch = ops.dispatch

    def slow_dispatch(*arguments):
        inside.set()
        assert go_on.wait(30)
        dispatch(*arguments)

    monkeypatch.setattr(ops, "dispatch", slow_dispatch)
    got = []
    thread = threading.Thread(target=lambda: got.append(ep.dispatch(*inputs())))
    thread.start()
    assert inside.wait(30)
    want = "another thread is in a call of this ExpertParallel: one thread at a time"
    for call in (
        lambda: ep.dispatch(*inputs()),
        lambda: ep.dispatch_send(*inputs()),
        lambda: ep.combine(torch.zeros(60, D), None),
        lambda: ep.route(randn(5, E)),
    ):
        with pytest.raises(RuntimeError, match=want):
            call()
    assert ep.health().timeouts == 0 and "round" in repr(ep)  # what only reads is open to every thread
    go_on.set()
    thread.join()
    monkeypatch.undo()
    x, *_ = inputs()
    torch.testing.assert_close(ep.combine(got[0].rows, got[0]), x)  # a thread may hand a round on
    assert_works(ep)


def test_a_refused_call_leaves_the_expert_parallel_to_other_threads(ep):
    with pytest.raises(TypeError):
        ep.dispatch(None, None, None)
    thread = threading.Thread(target=assert_works, args=[ep])
    thread.start()
    thread.join()
    assert sum(ep.health().tokens_per_expert) == 5 * K  # the other thread's round is complete


def test_a_refused_thread_costs_another_no_round(ep, monkeypatch):
    """The thread with the open round waits for the call that is about to be refused."""
    inside, go_on, next_epoch = threading.Event(), threading.Event(), RoundState.next_epoch
    x, *routing = inputs()
    d = ep.dispatch(x, *routing)

    def slow_next_epoch(self):
        inside.set()
        assert go_on.wait(30)
        return next_epoch(self)

    def refused():
        with pytest.raises(epmoe.EPStateError, match="round 1 is still open"):
            ep.dispatch(x, *routing)

    monkeypatch.setattr(RoundState, "next_epoch", slow_next_epoch)
    thread = threading.Thread(target=refused)
    thread.start()
    assert inside.wait(30)
    timer = threading.Timer(0.05, go_on.set)
    timer.start()
    torch.testing.assert_close(ep.combine(d.rows, d), x)
    for ends in (thread, timer):
        ends.join()
    assert_works(ep)


@pytest.mark.parametrize("during", ["a call", "a round"])
def test_what_follows_a_refusal_harms_no_round(ep, monkeypatch, during):
    """Neither `abort`, as after any exception, nor a layer that gives its round up, nor `skip`."""
    x, *routing = inputs()
    dispatch, errors = ops.dispatch, []

    def refused():
        try:
            for _ in range(2):
                with pytest.raises(RuntimeError, match="another thread is in a call|still open"):
                    ep.dispatch(x, *routing)
                ep.abort()
                with pytest.raises(RuntimeError, match="another thread is in a call|still open"), ep.giving_up(0):
                    ep.dispatch(x, *routing)
                with pytest.raises(RuntimeError, match="another thread"):
                    ep.skip()
        except BaseException as error:
            errors.append(error)

    def on_a_thread():
        thread = threading.Thread(target=refused)
        thread.start()
        thread.join()

    def interrupted(*arguments):
        on_a_thread()
        dispatch(*arguments)

    if during == "a call":
        monkeypatch.setattr(ops, "dispatch", interrupted)
    d = ep.dispatch(x, *routing)
    monkeypatch.undo()
    if during == "a round":
        on_a_thread()
    torch.testing.assert_close(ep.combine(d.rows, d), x)
    assert not errors and ep.health().aborted_rounds == [0] and ep.health().rounds == 1
    assert_works(ep)


def test_the_round_of_a_thread_that_has_ended_can_be_aborted(ep):
    thread = threading.Thread(target=lambda: ep.dispatch(*inputs()))
    thread.start()
    thread.join()
    with pytest.raises(epmoe.EPStateError, match="round 1 is still open"):
        ep.dispatch(*inputs())
    ep.abort()
    assert_works(ep)


def test_threads_without_order_get_errors_and_no_wrong_result(ep):
    """A refused call changes nothing and may be repeated; every round that completes is right."""
    wrong, refused = [], set()

    def repeat_until_accepted(call, *arguments):
        while True:
            try:
                return call(*arguments)
            except RuntimeError as error:
                refused.add(re.sub(r"\d+", "n", str(error)))
                time.sleep(1e-5)  # otherwise this loop would keep the interpreter to itself for 5 ms

    def play(seed: int) -> None:
        for n in range(100):
            x = torch.full((4, D), float(seed * 1000 + n))
            d = repeat_until_accepted(ep.dispatch, x, *inputs(4)[1:])
            y = repeat_until_accepted(ep.combine, d.rows, d)
            wrong.extend([] if torch.allclose(y, x) else [n])

    threads = [threading.Thread(target=play, args=[seed]) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and repr(ep).endswith("round 300 closed)")
    assert refused <= {
        "another thread is in a call of this ExpertParallel: one thread at a time, so order their calls",
        "round n is still open: call combine, or abort on all ranks, before dispatch",
    }


def test_a_refused_transform_of_torch_func_leaves_nothing_behind(ep):
    """Also before the first round, whose views later rounds take."""
    layer, x = full_layer(ep)[0], inputs()[0]

    def dispatch(x: torch.Tensor) -> torch.Tensor:
        return ep.dispatch(x, *inputs(1)[1:]).rows

    refused = (
        lambda: torch.func.vmap(dispatch)(x[:, None]),
        lambda: torch.func.grad(lambda x: layer(x).sum())(x),
        lambda: torch.func.vmap(layer)(x[:, None]),
        lambda: torch.func.jvp(layer, (x,), (x,)),
    )
    for call in refused:
        for grad_mode in (True, False):
            with torch.inference_mode(False), torch.set_grad_enabled(grad_mode), pytest.raises(RuntimeError):
                call()
    assert_works(ep)
    with torch.inference_mode(False), torch.enable_grad():
        layer(x.clone()).sum().backward()
