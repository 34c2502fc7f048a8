"""Peers, with collectives in place of libraries: same routing, outputs checked, and what is absent is left out."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched import ROOT, torchrun

from epmoe.bench import gpu, layer, peers
from epmoe.bench.peers import Payload, Peer
from epmoe.bench.report import Job
from epmoe.bench.timing import Times
from epmoe.config.config import EPConfig

DRIVERS = ROOT / "benchmarks" / "peers"
MODEL = {"num_experts": 8, "num_experts_per_tok": 3, "hidden_size": 256, "intermediate_size": 256}


def _config(**sections: dict) -> EPConfig:
    return EPConfig(
        **{"model": MODEL, "topology": {"ep_size": 2}, "capacity": {"max_num_tokens_per_rank": 32}} | sections
    )


class WrongLayer(Peer):
    name, install = "wrong", "nothing"

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
        y_TD = torch.zeros_like(case.x_TD).index_copy(0, case.sampled, case.expected_SD.to(case.x_TD.dtype))
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

    name, install = "without a layer", "nothing"


def _worker(_: Path) -> None:
    """What each rank runs."""
    dist.init_process_group("gloo")
    gpu.measure, gpu.host_us = lambda side, *_: Times(1.0, 2.0, 3.0), lambda *_: (4.0, 5.0)
    rounds: list[str] = []
    gpu.measure_eager = lambda side, *_: rounds.append(side.name) or Times(1.0, 2.0, 30.0)
    of_torch = peers.load(DRIVERS / "nccl.py")
    options = {"contenders": [gpu.Contender.FUSED], "payloads": [Payload.PLAIN, Payload.FP8_OUT], "peers": of_torch}
    for config in (_config(), _config(model=MODEL | {"dtype": "float32"})):
        content = gpu.run(Job(config, (0, 1, 32), 1, "zipf"), **options).content
        assert content["left_out"]["NCCL all-gather, fp8-out"] == "it sends rows as they are"
        ran = [(r["tokens"], r["side"]) for r in content["results"] if r["payload"] == "plain"]
        names = [peer.name for peer in of_torch]
        assert ran == [(0, "fused"), *((T, name) for T in (1, 32) for name in ("fused", *names))]
    assert rounds == []
    report = gpu.run(Job(_config(), (4,), 1), **options, eager=True)
    assert report.benchmark == "eager" and rounds[1:3] == names
    assert all(r["round"] == 30 for r in report.content["results"])

    side = of_torch[0].side
    back, side.back = side.back, lambda self, handle: back(self, handle) * 1.5
    left_out = gpu.run(Job(_config(), (4,), 1), **options).content["left_out"]
    assert "the rows that came back differ" in left_out["NCCL all_to_all_single, plain"]
    side.back, side.out = back, lambda self: None  # nothing arrives: the second round sends what is poisoned
    left_out = gpu.run(Job(_config(), (4,), 1), **options).content["left_out"]
    assert "the rows that came back differ" in left_out["NCCL all_to_all_single, plain"]
    copies = _config(placement={"num_redundant_experts": 2})
    assert "without copies" in gpu.run(Job(copies, (4,), 1), **options).content["left_out"]["peers"]

    content = layer.run(Job(_config(), (0, 16), 1), peers=[OwnLayer(), WrongLayer(), *peers.load(DRIVERS)]).content
    tensor_parallel = (f"torch TP, {how} {torch.__version__}" for how in ("all-reduce", "all-gather"))
    sides = ["epmoe, torch", "own 1", *tensor_parallel]
    assert (
        [(r["tokens"], r["precision"], r["side"]) for r in content["results"]]
        == [
            (T, p, side)
            for T in (0, 16)
            for p in ("plain", "fp8", "MXFP4")  # which no peer takes
            for side in sides[: len(sides) if T and p != "MXFP4" else 1]
        ]
    )
    assert all(r["floor"] > 0 for r in content["results"] if r["tokens"])
    assert "the weighted sum" in content["left_out"]["wrong 1, fp8"]
    assert content["left_out"]["DeepGEMM MegaMoE"].startswith("needs sgl-deep-gemm")
    assert not any("NCCL" in name for name in content["left_out"])  # which has no layer

    steps = ["version", "open", "call 1", "call 2", "check", "close"]
    others = [*map(FailsOnRank1, steps), WithoutLayer(), OwnLayer()]
    content = layer.run(Job(_config(), (16,), 1), peers=others).content
    assert [r["side"] for r in content["results"]] == [*["epmoe, torch", "own 1"] * 2, "epmoe, torch"]
    reasons = {name.partition(",")[0]: reason for name, reason in content["left_out"].items()}
    assert "the weighted sum" in reasons["check"], "rank 1 says why"
    assert all(reasons[name] == f"OSError('no {name}')" for name in steps if name != "check")
    dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    done = torchrun(2, __file__, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_driver_names_what_to_install() -> None:
    every = peers.load(DRIVERS)
    assert len({peer.name for peer in every}) == len(every) == 11 and all(peer.install for peer in every)


def test_a_folder_without_drivers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no driver"):
        peers.load(tmp_path)
    with pytest.raises(ValueError, match="is no Python file"):
        peers.load(tmp_path / "driver.py")


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
