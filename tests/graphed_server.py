"""examples/serve.py on GPUs, without HTTP: a step of a rank is a replay of a CUDA graph. Ranks are killed under load.

Run: python tests/graphed_server.py [--ranks 2] [--deaths 5]     prints a line of JSON for each death, and a last one

Clients have one request each at a time, with prompts drawn by a seed. Tokens must be those of one process on the CPU.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import serve_front  # noqa: E402
import serve_rank  # noqa: E402
from helpers import continued  # noqa: E402

import epmoe  # noqa: E402

SIZES = (1, 2, serve_rank.BATCH)  # of batches with a graph
CLIENTS, WAIT_S = 8, 60.0
_configured, _run_rank = serve_rank.configured, serve_rank.run_rank


class Experts(epmoe.GroupedExperts):
    """In fp32 for graphs: every row meets every expert. Tokens then agree with those of a CPU."""

    def forward(self, rows_ND: Tensor, expert_offsets: Tensor, scales: Tensor | None = None, **_: object) -> Tensor:
        row = torch.arange(len(rows_ND), device=rows_ND.device)
        expert = torch.searchsorted(expert_offsets[1:].long(), row, right=True).clamp(max=len(self.w_down) - 1)
        gate, up = torch.einsum("nd,efd->enf", rows_ND, self.w_gate_up).chunk(2, dim=-1)
        all_outputs = torch.einsum("enf,edf->end", torch.nn.functional.silu(gate) * up, self.w_down)
        return all_outputs[expert, row]


class Graph:
    """The captured step of a batch of up to `size` requests."""

    def __init__(self, model: Model, size: int) -> None:
        self.size, self.device = size, model.ep.device
        self.tokens = torch.zeros(size, serve_rank.LENGTH, dtype=torch.int64, device=self.device)
        self.ends = torch.zeros(size, dtype=torch.int64, device=self.device)
        model.compute(self.tokens, self.ends)
        model.ep.check()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.next = model.compute(self.tokens, self.ends)

    def replay(self, batch: list[list[int]]) -> Tensor:
        rows = [[*tokens, *[0] * serve_rank.LENGTH][: serve_rank.LENGTH] for tokens in batch]
        ends = [len(tokens) - 1 for tokens in batch]
        self.tokens[: len(rows)] = torch.tensor(rows, dtype=torch.int64).view(-1, serve_rank.LENGTH).to(self.device)
        self.ends[: len(rows)] = torch.tensor(ends, dtype=torch.int64).to(self.device)
        self.graph.replay()
        return self.next[: len(rows)]


class Model(serve_rank.Model):
    def __init__(self, ep: epmoe.ExpertParallel) -> None:
        super().__init__(ep)
        self.to(ep.device)
        self.graphs: list[Graph] = []
        self.generation = -1
        self.load(())

    @torch.inference_mode()
    def forward(self, batch: list[list[int]]) -> list[int]:
        if self.generation != self.ep.generation:  # every rank comes here in its first step in a group
            begin = time.monotonic()
            self.graphs, self.generation = [Graph(self, size) for size in SIZES], self.ep.generation
            report("captured", begin)
        graph = next(graph for graph in self.graphs if graph.size >= len(batch))
        tokens = graph.replay(batch)
        self.ep.check()
        return tokens.tolist()

    def compute(self, tokens: Tensor, ends: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[torch.arange(len(ends), device=ends.device), ends])).argmax(1)

    def load(self, moves: tuple[epmoe.Move, ...]) -> None:
        for block, (_, gate_up, down) in zip(self.blocks, self.full, strict=True):
            held, device = self.ep.logical_experts(block.moe.tag), self.ep.device
            if not isinstance(block.moe.experts, Experts) or len(held) != len(block.moe.experts.w_down) or moves:
                block.moe.experts = Experts(gate_up[held].to(device), down[held].to(device))


class Rank(serve_rank.Rank):
    def recover(self) -> tuple[int, int]:
        begin = time.monotonic()
        try:
            return super().recover()
        finally:
            report("recovered", begin)

    def resize(self, size: int) -> tuple[object, int]:
        begin = time.monotonic()
        try:
            return super().resize(size)
        finally:
            report("resized", begin)


def report(what: str, begin: float) -> None:
    print(f"{os.getpid()}: {what} in {time.monotonic() - begin:.3f} s", file=sys.stderr, flush=True)


def configured(size: int, served: serve_rank.Served = serve_rank.SMALL) -> epmoe.EPConfig:
    deadlines = {"timeout_s": serve_rank.DEADLINE_S, "warmup_timeout_s": serve_rank.DEADLINE_S}
    config = _configured(size, served).model_dump()
    return epmoe.EPConfig(**config | {"exchange": {"transport": "nvlink", **deadlines}})


def run_rank(pipe, folder: str, rank: int | None, size: int, *options: object) -> None:
    """A rank takes the first GPU that no other process has; the lock of a process that dies is free at once."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # of fewer GPUs than ranks
    for place in count():
        lock = os.open(Path(folder) / f"gpu-{place}", os.O_CREAT)
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
    torch.cuda.set_device(place % torch.cuda.device_count())
    torch.cuda.synchronize()
    serve_rank.configured, serve_rank.Model, serve_rank.Rank = configured, Model, Rank
    _run_rank(pipe, folder, rank, size, *options)


class Load:
    """Clients that ask, and what was answered."""

    def __init__(self, front: serve_front.Front) -> None:
        self.front, self.answers, self.ended = front, list[tuple[list[int], int, int, dict]](), False
        self.clients = [threading.Thread(target=self._ask, args=(seed,), daemon=True) for seed in range(CLIENTS)]
        for client in self.clients:
            client.start()

    def _ask(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self.ended:
            prompt = [draw.randrange(serve_rank.VOCABULARY) for _ in range(draw.randint(1, 12))]
            most = draw.randint(1, 12)
            answer: Future = self.front.submit(list(prompt), most)
            self.answers.append((prompt, most, *answer.result(WAIT_S)))

    def more(self, answers: int) -> None:
        goal = len(self.answers) + answers
        wait(lambda: len(self.answers) >= goal)

    def check(self, model: serve_rank.Model) -> tuple[int, int]:
        """How many answers are right, and how many requests went with ranks that have died."""
        self.ended = True
        for client in self.clients:
            client.join(WAIT_S)
        assert not any(client.is_alive() for client in self.clients), "a request was lost"
        right = [answer for answer in self.answers if answer[2] == 200]
        lost = [answer for answer in self.answers if answer[2] != 200]
        assert all(status == 503 and "has died" in content["error"] for *_, status, content in lost), lost
        expected = continued(model, [answer[:2] for answer in right], serve_rank.BATCH)
        wrong = [(answer, tokens) for answer, tokens in zip(right, expected, strict=True)
                 if answer[3]["tokens"] != tokens]  # fmt: skip
        assert not wrong, (len(wrong), len(right), wrong[0])
        return len(right), len(lost)


def wait(what) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--deaths", type=int, default=5)
    arguments = parser.parse_args()
    with epmoe.ExpertParallel(_configured(1)) as alone, tempfile.TemporaryDirectory() as folder:
        model = serve_rank.Model(alone)
        serve_front.run_rank = run_rank
        front = serve_front.Front(folder, arguments.ranks)
        threading.Thread(target=front.run, daemon=True).start()
        load = Load(front)
        load.more(40)
        deaths = []
        for death in range(arguments.deaths):
            front.gap.set(0)
            victim = sorted(front.members, key=lambda member: member.rank)[death % arguments.ranks]
            os.kill(victim.process.pid, signal.SIGKILL)
            begin = time.monotonic()
            wait(lambda victim=victim: victim not in front.members)
            wait(lambda: len(front.members) == arguments.ranks)
            back_s = time.monotonic() - begin
            load.more(40)
            deaths.append(
                {"death": death, "whole_again_s": round(back_s, 2), "gap_s": round(front.gap._value.get(), 3)}
            )
            print(json.dumps(deaths[-1]), flush=True)
        right, lost = load.check(model)
        print(json.dumps({"right": right, "of_dead_ranks": lost, "deaths": deaths}), flush=True)


if __name__ == "__main__":
    code = 1
    try:
        main()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # the front would replace ranks that end, and they end with this process
