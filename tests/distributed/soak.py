"""Rounds for minutes, each compared on the device: `make soak`.

    torchrun --standalone --nproc-per-node 2 tests/distributed/soak.py --seconds 60 [--rounds 2000000] [--device cpu]

Every round has other tokens, of another number. On GPUs most rounds run in replays of graphs of 50 rounds, in which
each rank may replay another number of tokens; others are eager, some by phases. Ranks stall at random, on the host and
on the device.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from exchanges import make_config
from torch import Tensor

from epmoe import Dispatched, ExpertParallel
from epmoe.exchange import memory
from epmoe.exchange.handles import Layout

D, K, M = 256, 4, 256
POOL = 16  # of different inputs
SIZES = (8, 64, M)  # tokens of a call
REPLAYED = 50  # rounds of a graph
CHECKED = 200  # turns between two looks at the counters


class Rounds:
    """Rounds of calls of T tokens and one layout, whose experts return their rows: y is K · x, in integers."""

    def __init__(self, ep: ExpertParallel, T: int, layout: Layout) -> None:
        self.ep, self.layout = ep, layout
        bits, E = torch.Generator().manual_seed(100 * T + ep.rank), ep.config.model.num_experts
        token = torch.arange(POOL * T).view(POOL, T, 1) * 7 + ep.rank * 3
        x = (token + torch.arange(D)) % 31 - 15
        ids = torch.rand(POOL, T, E, generator=bits).argsort(2)[:, :, :K]
        real = torch.randint(0, T + 1, (POOL,), generator=bits)
        self.x, self.ids, self.real = x.bfloat16().to(ep.device), ids.int().to(ep.device), real.int().to(ep.device)
        self.ones, self.row = torch.ones(T, K, device=ep.device), torch.arange(T, device=ep.device)[:, None]
        is_mine = torch.cat([ep.placement.expert_map(ep.rank) >= 0, torch.tensor([False])])  # for a sentinel of P
        self.is_mine = is_mine.bfloat16().to(ep.device)
        self.turn, self.wrong = (torch.zeros(1, dtype=torch.int64, device=ep.device) for _ in range(2))
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, rounds: int, phases: bool = False, stall: int = 0) -> None:
        """Rounds on the inputs that follow the last one. `stall`: cycles that the GPU sleeps, now and then."""
        for n in range(rounds):
            x, ids, real = (t.index_select(0, self.turn % POOL)[0] for t in (self.x, self.ids, self.real))
            if stall and n % 10 == self.ep.rank:
                torch.cuda._sleep(stall)
            y = self._phases(x, ids, real) if phases else self._stages(x, ids, real)
            self.wrong += (y != torch.where(self.row < real, K * x, 0)).sum()
            self.turn += 1

    def capture(self, stall: int) -> None:
        self.run(1)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run(REPLAYED, stall=stall)

    def _stages(self, x: Tensor, ids: Tensor, real: Tensor) -> Tensor:
        d = self.ep.dispatch(x, ids, self.ones, num_tokens=real, layout=self.layout)
        return self.ep.combine(d.rows, d) if self.layout == "expert" else self.ep.combine_partial(self._partial(d), d)

    def _phases(self, x: Tensor, ids: Tensor, real: Tensor) -> Tensor:
        d = self.ep.dispatch_recv(self.ep.dispatch_send(x, ids, self.ones, num_tokens=real, layout=self.layout))
        self.ep.combine_send(d.rows if self.layout == "expert" else self._partial(d), d)
        return self.ep.combine_recv(d)

    def _partial(self, d: Dispatched) -> Tensor:
        return d.recv.x * self.is_mine[d.recv.ids.long()].sum(-1, keepdim=True)


def memory_of(device: torch.device) -> list[int]:
    """Bytes: of this process on the host, of torch's tensors, and in use on the device."""
    gc.collect()
    host = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cpu":
        return [host, 0, 0]
    free, total = torch.cuda.mem_get_info(device)
    return [host, torch.cuda.memory_allocated(device), total - free]


@dataclass
class Soak:
    """Turns of a few rounds, drawn alike on all ranks; sizes and stalls are each rank's own."""

    device: torch.device
    seed: int = 0
    rounds: int = 0
    eps: list[ExpertParallel] = field(default_factory=list)

    def __post_init__(self) -> None:
        rank, size, most = dist.get_rank(), dist.get_world_size(), memory.LL_MAX_TOKENS
        self.shared, self.own = random.Random(self.seed), random.Random(f"{self.seed} {rank}")
        config = make_config(size, experts=4 * size, top_k=K, hidden=D, dtype="bfloat16", max_tokens=M)
        try:
            for memory.LL_MAX_TOKENS in (most, 16):  # by the LL protocol, and mostly by the Simple one
                self.eps.append(ExpertParallel(config, device=self.device))
        finally:
            memory.LL_MAX_TOKENS = most
        self.kinds = [[Rounds(ep, T, layout) for T in SIZES] for ep in self.eps for layout in ("expert", "rank")]
        if self.device.type == "cuda":
            for rounds in self.all():
                rounds.capture(stall=self.own.randrange(20_000))
            self.rounds += len(self.all())
        self.events: list[torch.cuda.Event] = []

    def turn(self) -> None:
        """Some rounds: a replay, or a few eager ones."""
        rounds = self.own.choice(self.shared.choice(self.kinds))
        eager, phases, few = self.shared.random() < 0.1, self.shared.random() < 0.3, self.shared.randint(1, 4)
        if self.own.random() < 0.01:
            time.sleep(self.own.random() * 0.01)
        if rounds.graph is None or eager:
            rounds.run(few, phases)
            self.rounds += few
        else:
            if self.own.random() < 0.05:
                torch.cuda._sleep(self.own.randrange(2_000_000))
            rounds.graph.replay()
            self.rounds += REPLAYED
        if self.device.type == "cuda":
            self._wait_for_earlier_turns()
        rounds.ep.poll()

    def wrong(self) -> int:
        """Values of y that were not as expected, on all ranks. Collective."""
        for ep in self.eps:
            ep.check()
        wrong = torch.stack([rounds.wrong for rounds in self.all()]).sum().cpu()
        dist.all_reduce(wrong)
        return int(wrong)

    def _wait_for_earlier_turns(self, most: int = 4) -> None:
        self.events.append(torch.cuda.Event())
        self.events[-1].record()
        if len(self.events) > most:
            self.events.pop(0).synchronize()

    def all(self) -> list[Rounds]:
        return [rounds for kind in self.kinds for rounds in kind]


def soak(device: torch.device, seed: int, most_rounds: int, seconds: float) -> Iterator[tuple[int, int, list[int]]]:
    """Yields rounds, mismatches and memory so far, every `CHECKED` turns."""
    run, deadline = Soak(device, seed), time.monotonic() + seconds
    on = torch.ones(1)
    while on:
        for _ in range(CHECKED if device.type == "cuda" else 20):
            run.turn()
        yield run.rounds, run.wrong(), memory_of(device)
        on.fill_(run.rounds < most_rounds and time.monotonic() < deadline)
        dist.broadcast(on, 0)
    for ep in run.eps:
        ep.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1 << 62, help="at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    started = time.monotonic()
    reports = soak(torch.device(options.device), options.seed, options.rounds, options.seconds)
    rounds, wrong, first = next(reports)
    memory_now = first
    for rounds, wrong, memory_now in reports:  # noqa: B007 the last one counts
        pass
    growth = [[0]] * dist.get_world_size()
    dist.all_gather_object(growth, [now - before for now, before in zip(memory_now, first, strict=True)])
    if dist.get_rank() == 0:
        took = time.monotonic() - started
        print(f"{rounds:,} rounds in {took:.0f} s, {1e6 * took / rounds:.1f} us a round; {wrong} values are wrong")
        for rank, (host, tensors, in_use) in enumerate(growth):
            print(f"rank {rank}: bytes more than at first: host {host:,}, tensors {tensors:,}, device {in_use:,}")
    dist.destroy_process_group()
    return int(wrong > 0 or any(host > 16 << 20 or tensors > 0 for host, tensors, _ in growth))


if __name__ == "__main__":
    sys.exit(main())
