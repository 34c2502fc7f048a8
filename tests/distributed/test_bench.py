"""The benchmarks, small: results of all sides agree with the expected sums, and what is wrong or
absent is left out.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from helpers import ON_THE_CPU, ROOT

from epmoe import EPConfig, ExpertParallel, MoELayer
from epmoe.bench import cpu, gpu, layer, peers, sides, training
from epmoe.bench.layer_sides import Precision, random_experts
from epmoe.bench.peers import Payload, Peer
from epmoe.bench.report import Job
from epmoe.bench.sample import Sample
from epmoe.bench.sides import Fused, Side
from epmoe.bench.timing import Times
from epmoe.bench.trained_layer import EagerLayer, OverExchange, TrainedLayer
from epmoe.local.spread import local_view
from epmoe.training import TrainingExchange

pytestmark = ON_THE_CPU

TOKENS = (0, 1, 32)
COPIES = {"strategy": "round_robin", "num_redundant_experts": 2}
GPU_SIDES = ["rows", "rank-major", "fused"]


@pytest.fixture
def make(size, device) -> Callable[..., EPConfig]:
    def make(
        placement: dict | None = None, ranks_per_node: int | None = None, **model: object
    ) -> EPConfig:
        shape = {
            "num_experts": 4 * size,
            "num_experts_per_tok": 3,
            "hidden_size": 256,
            "dtype": "float32",
        }
        return EPConfig(
            model=shape | model,
            topology={"ep_size": size, "ranks_per_node": ranks_per_node or size},
            placement=placement or {},
            capacity={"max_num_tokens_per_rank": 32, "alignment": 4},
        )

    return make


@pytest.mark.parametrize(
    ("nodes", "model", "measured"),
    [
        (False, {"dtype": "bfloat16"}, ["epmoe", "gloo", "gloo, kept buffers"]),
        (True, {}, ["epmoe", "epmoe, fp8 out", "pairs", "pairs, kept buffers"]),
        (True, {"hidden_size": 64}, ["epmoe", "pairs", "pairs, kept buffers"]),
    ],
)
def test_cpus(make, monkeypatch, nodes, model, measured):
    steps: list[None] = []
    config = make(COPIES, ranks_per_node=1 if nodes else None, **model)
    report = cpu.run(Job(config, TOKENS, 2, advance=lambda: steps.append(None)))
    assert report.benchmark == ("rail" if nodes else "gloo") and len(steps) == 3 * 2
    # Each side of each T, with ratios to the other exchange.
    rows = report.results
    assert [(row["tokens"], row["side"]) for row in rows] == [
        (T, side) for T in TOKENS for side in measured
    ]
    for T in TOKENS:
        *_, fresh, kept = of_T = [row for row in rows if row["tokens"] == T]
        for row in of_T:
            assert 0 < max(row["dispatch"], row["combine"]) <= row["round"]
            assert (row["ratio"], row["ratio_kept"]) == (
                fresh["round"] / row["round"],
                kept["round"] / row["round"],
            )
    # A side whose output is wrong is told.
    back = sides.AllToAll.back
    monkeypatch.setattr(sides.AllToAll, "back", lambda self, handle: back(self, handle) * 1.5)
    with pytest.raises(
        RuntimeError, match=f"{measured[-2]}: the round's output is not the weighted sum"
    ):
        cpu.run(Job(config, (4,), 1))


@pytest.fixture
def on_gpus(monkeypatch) -> list[str]:
    """Rounds that stand for GPUs' here must be equal bit by bit, but for peers'. The names of eager
    sides.
    """

    def measure(side: Side, repeats: int, group: dist.ProcessGroup) -> Times:
        rounds = []
        for _ in range(2):
            handle = side.out()
            left = [tensor.clone() for tensor in side.arrived(handle)]
            rounds.append([*left, side.back(handle).clone()])
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(*rounds, strict=True)
        )
        return Times(1.0, 2.0, 3.0)

    eager: list[str] = []
    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(
        gpu, "measure_eager", lambda side, *_: eager.append(side.name) or Times(1.0, 2.0, 30.0)
    )
    monkeypatch.setattr(gpu, "host_us", lambda *_: (4.0, 5.0))
    return eager


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sides_of_gpus_with_copies_of_experts(make, on_gpus, rank, dtype):
    config = make(COPIES, dtype=dtype)
    results = gpu.run(
        Job(config, TOKENS, 2), contenders=[gpu.Contender(side) for side in GPU_SIDES]
    ).results
    assert [(r["tokens"], r["side"], r["payload"]) for r in results] == [
        (T, side, payload)
        for T in TOKENS
        for payload in Payload
        for side in GPU_SIDES[0 if payload == "plain" else 1 :]
    ]
    with ExpertParallel(config) as ep:
        sample = Sample(config, ep.rank, 32, "zipf")
        side = Fused(ep, sample)
        handle = side.out()
        assert handle.recv.counts.tolist() == sample.rows_RR[:, ep.rank].tolist()
        side.back(handle)


def test_peers_of_an_exchange(make, on_gpus, monkeypatch, rank):
    of_torch = peers.load(ROOT / "benchmarks" / "peers" / "nccl.py")
    names = [peer.name for peer in of_torch]

    def run(config: EPConfig, tokens: tuple[int, ...] = (4,), eager: bool = False):
        contenders = [gpu.Contender.FUSED]
        payloads = [Payload.PLAIN, Payload.FP8_OUT]
        job = Job(config, tokens, 1, "zipf")
        return gpu.run(job, contenders=contenders, payloads=payloads, peers=of_torch, eager=eager)

    # Peers carry plain rows, where there are tokens,
    report = run(make(), (0, 1, 32))
    assert report.left_out["NCCL all-gather, fp8-out"] == "it sends rows as they are"
    ran = [(r["tokens"], r["side"]) for r in report.results if r["payload"] == "plain"]
    assert (
        ran == [(0, "fused"), *((T, name) for T in (1, 32) for name in ("fused", *names))]
        and not on_gpus
    )
    # also in eager mode.
    report = run(make(dtype="bfloat16"), eager=True)
    assert report.benchmark == "eager" and on_gpus[1:3] == names
    assert all(r["round"] == 30 for r in report.results)

    # Wrong rows, and none at all.
    wrong = "the rows that came back differ"
    side = of_torch[0].side
    with monkeypatch.context() as patch:
        patch.setattr(side, "back", lambda self, handle, back=side.back: back(self, handle) * 1.5)
        assert wrong in run(make()).left_out["NCCL all_to_all_single, plain"]
    # On one rank alone, in its first round: others wait for it in the second one.
    rounds = itertools.count(rank)
    with monkeypatch.context() as patch:
        back = side.back
        patch.setattr(side, "back", lambda *given: back(*given) * (1 if next(rounds) else 1.5))
        assert wrong in run(make()).left_out["NCCL all_to_all_single, plain"]
    # Nothing arrives: the second round sends what is poisoned.
    monkeypatch.setattr(side, "out", lambda self: None)
    assert wrong in run(make()).left_out["NCCL all_to_all_single, plain"]
    assert "without copies" in run(make({"num_redundant_experts": 2})).left_out["peers"]


class WrongLayer(Peer):
    name = "wrong"
    install = "nothing"

    def version(self) -> str:
        return "1"

    def layer(self, case):
        return nullcontext(lambda: torch.zeros_like(case.x_TD))


class OwnLayer(WrongLayer):
    """Ours, as a peer would run it."""

    name = "own"

    def layer(self, case):
        return nullcontext(lambda: case.back(case.out()))


class FailsOnRank1(WrongLayer):
    """Whose step `name` raises on one of the ranks. It waits for nobody."""

    def __init__(self, name: str) -> None:
        self.name = name

    def version(self) -> str:
        self.step("version")
        return ""

    @contextmanager
    def layer(self, case):
        self.step("open")
        y_TD = torch.zeros_like(case.x_TD).index_copy(
            0, case.sampled, case.expected_SD.to(case.x_TD.dtype)
        )
        calls = []

        def run() -> torch.Tensor:
            calls.append(None)
            self.step(f"call {len(calls)}")
            return y_TD * (self.name != "check" or dist.get_rank() == 0)

        yield run
        self.step("close")

    def step(self, name: str) -> None:
        if name == self.name and dist.get_rank() == 1:
            raise OSError(f"no {name}")


class WithoutLayer(Peer):
    """Is not asked for its version: to load a library takes long."""

    name = "without a layer"
    install = "nothing"


def test_peers_of_a_layer(make, size):
    config = make(dtype="bfloat16", intermediate_size=128 * size)
    every = [OwnLayer(), WrongLayer(), *peers.load(ROOT / "benchmarks" / "peers")]
    report = layer.run(Job(config, (0, 16), 1), peers=every)
    tensor_parallel = (
        f"torch TP, {how} {torch.__version__}" for how in ("all-reduce", "all-gather")
    )
    measured = ["epmoe, torch", "own 1", *tensor_parallel]
    assert [(r["tokens"], r["precision"], r["side"]) for r in report.results] == [
        (T, p, side)
        for T in (0, 16)
        # No peer takes the last three.
        for p in ("plain", "fp8", "MXFP4", "MXFP4, fp8 rows", "NVFP4")
        for side in measured[: len(measured) if T and p in ("plain", "fp8") else 1]
    ]
    assert all(r["floor"] > 0 for r in report.results if r["tokens"])
    assert "the weighted sum" in report.left_out["wrong 1, fp8"]
    assert report.left_out["DeepGEMM MegaMoE"].startswith("needs sgl-deep-gemm")
    assert not any("NCCL" in name for name in report.left_out)  # which has no layer


def test_a_peer_that_fails_on_one_rank_is_left_out_on_all(make):
    steps = ["version", "open", "call 1", "call 2", "check", "close"]
    others = [*map(FailsOnRank1, steps), WithoutLayer(), OwnLayer()]
    report = layer.run(Job(make(dtype="bfloat16", intermediate_size=128), (16,), 1), peers=others)
    # No peer takes the last three precisions.
    sides = [*["epmoe, torch", "own 1"] * 2, *["epmoe, torch"] * 3]
    assert [r["side"] for r in report.results] == sides
    reasons = {name.partition(",")[0]: reason for name, reason in report.left_out.items()}
    assert "the weighted sum" in reasons["check"], "rank 1 says why"
    assert all(reasons[name] == f"OSError('no {name}')" for name in steps if name != "check")


@pytest.mark.slow
def test_layers_with_copies_of_experts(make, monkeypatch, size, folder):
    steps: list[None] = []
    lines: list[str] = []
    config = make(COPIES, dtype="bfloat16", intermediate_size=128)
    report = layer.run(Job(config, TOKENS, 2, advance=lambda: steps.append(None), log=lines.append))
    # A line and a row for each precision and T.
    precisions = ("plain", "fp8", "MXFP4", "MXFP4, fp8 rows", "NVFP4")
    assert report.benchmark == "layer" and len(steps) == len(TOKENS) * len(Precision)
    assert report.left_out == {"plain, DeepGEMM": "DeepGEMM is for GPUs"}
    assert [line.partition(":")[0] for line in lines] == [
        f"{T} tokens, {p}" for p in precisions for T in TOKENS
    ]
    assert [(row["tokens"], row["precision"]) for row in report.results] == [
        (T, p) for T in TOKENS for p in precisions
    ]
    # The experts are a part of the layer, and rows count copies.
    for row in report.results:
        assert (
            min(row["layer"], row["experts"], row["exchange"]) > 0 and row["side"] == "epmoe, torch"
        )
        assert row["on_top"] == row["layer"] - row["experts"]
        assert row["tokens"] * 3 <= row["rows"] <= size * row["tokens"] * 3 + 6 * 3
    # An output that is wrong is told.
    combine = ExpertParallel.combine
    for factor in (1.2, torch.nan):
        monkeypatch.setattr(
            ExpertParallel, "combine", lambda *given, factor=factor: combine(*given) * factor
        )
        with pytest.raises(RuntimeError, match="the layer: y is not the weighted sum"):
            layer.run(Job(config, (4,), 1))


def test_training(make, monkeypatch):
    config = make(intermediate_size=128)
    report = training.run(Job(config, (0, 16), 1), payload="fp8")
    sides_of_all = [(T, side) for T in (0, 16) for side in ("epmoe", "all_to_all_single")]
    assert [
        (row["tokens"], row["side"]) for row in report.results
    ] == sides_of_all and report.benchmark == "training"
    # Times, products and eager figures of each side.
    for row in report.results:
        assert row["layer"] == row["forward"] + row["backward"]
        assert "memory" not in row  # which is of GPUs
        is_ours = row["side"] == "epmoe"
        assert ("eager_forward" in row) == ("eager_backward" in row) == is_ours
        assert not is_ours or min(row["eager_forward"], row["eager_backward"]) > 0
        products_us = 6 * row["tokens"] * 3 * 256 * 128 * 1e-6
        assert row["forward_tflops"] * row["forward"] == pytest.approx(products_us)
        assert row["backward_tflops"] * row["backward"] == pytest.approx(2 * products_us)
        measured = ("combine", "layer") if row["side"] == "all_to_all_single" else report.plotted
        assert all(row[column] > 0 for column in measured)
    assert json.loads(json.dumps(report.content))["plotted"] == list(report.plotted)


@pytest.fixture
def trained(make) -> Iterator[TrainedLayer]:
    """A layer over a `TrainingExchange`, as the benchmark trains it."""
    config = make(intermediate_size=128)
    with ExpertParallel(config) as ep:
        experts = random_experts(config, ep.rank, ep.device, Precision.PLAIN).requires_grad_()
        through = OverExchange(TrainingExchange(ep), experts)
        yield TrainedLayer("trained", Sample(config, ep.rank, 16), "zipf", experts, through)


def test_the_trained_layer_is_a_moe_layer(trained):
    y_TD, *gradients = trained.results()
    through = trained.through
    layer = MoELayer(
        through.exchange.ep,
        trained.router_ED.detach(),
        through.experts,
        exchange=through.exchange,
        num_rows=through.num_rows,
    )
    inputs = [trained.x_TD, layer.router_weight, *through.experts.parameters()]
    want_TD = layer(trained.x_TD)
    wanted = map(local_view, torch.autograd.grad(want_TD, inputs, trained.grad_TD))
    assert torch.equal(y_TD, want_TD) and all(map(torch.equal, gradients, wanted))


def test_an_eager_layer_computes_what_the_trained_layer_does(trained):
    want_TD, *wanted = trained.results()
    through = trained.through
    eager = EagerLayer(trained, through.exchange, through.experts, through.num_rows)
    y_TD = eager.out()
    gradients = map(local_view, eager.back(y_TD))
    assert torch.equal(y_TD, want_TD) and all(map(torch.equal, gradients, wanted))


def test_a_layer_that_needs_more_has_no_eager_figures(make):
    config = make(intermediate_size=128)
    config = config.model_copy(
        update={"routing": config.routing.model_copy(update={"selection_bias": True})}
    )
    report = training.run(Job(config, (4,), 1))
    assert "`bias` must be given" in report.left_out["eager"]
    assert "eager_forward" not in report.results[0]


@pytest.mark.parametrize("wrong", ["all-to-all", "the layer over all-to-all"])
def test_training_that_is_wrong(make, monkeypatch, wrong):
    summed = sides.AllToAll.summed
    of_layer = wrong != "all-to-all"

    def scaled(self, rows, weights, handle):
        return summed(self, rows, weights, handle) * (1 if of_layer and weights.is_leaf else 1.5)

    monkeypatch.setattr(sides.AllToAll, "check", lambda self: None)
    monkeypatch.setattr(sides.AllToAll, "summed", scaled)
    with pytest.raises(RuntimeError, match=f"{wrong}: its gradients are not those of the exchange"):
        training.run(Job(make(intermediate_size=128), (16,), 1))
