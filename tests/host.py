"""A host of ranks that resume: it starts processes, and says what each of them runs, step by step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import torch
import torch.distributed as dist
from exchanges import Tokens, assert_y, dequantized, gains, make_config, make_tokens

import epmoe
from epmoe import Move, Placement

EXPERTS = 8
FORM_S, RESUME_S = 20.0, 4.0  # deadlines of a process group and of `resume`
SLACK_S = 5.0  # this machine may have fewer cores than ranks
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "epmoe"])


class Host:
    """Processes by number, of which each runs one function at a time: `function(state, *arguments)`."""

    def __init__(self, folder: Path, device: torch.device):
        self.folder, self.device, self.processes, self.pipes, self.groups = folder, device, {}, {}, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()

    def spawn(self, *names: int) -> None:
        for name in names:
            self.pipes[name], theirs = context.Pipe()
            self.processes[name] = context.Process(target=_serve, args=(name, self.device, theirs), daemon=True)
            self.processes[name].start()
            theirs.close()

    def start(self, names: list[int], function: Callable, *arguments: object) -> None:
        for name in names:
            self.pipes[name].send((function, arguments))

    def results(self, names: list[int], timeout_s: float = 60.0) -> list:
        assert all(self.pipes[name].poll(timeout_s) for name in names), "a rank does not answer"
        return [self.pipes[name].recv() for name in names]

    def answers(self, names: list[int]) -> list:
        """The `results`. Raises AssertionError with the exception of a rank."""
        results = self.results(names)
        errors = [result for result in results if isinstance(result, str) and result != "played"]
        assert not errors, errors
        return results

    def do(self, names: list[int], function: Callable, *arguments: object) -> list:
        """What the function returns on each of the processes, which run it at the same time."""
        self.start(names, function, *arguments)
        return self.results(names)

    def succeed(self, names: list[int], function: Callable, *arguments: object) -> list:
        """Does as `do` does. Raises AssertionError with the exception of a rank."""
        self.start(names, function, *arguments)
        return self.answers(names)

    def form(self, names: list[int]) -> None:
        """A process group over a file."""
        self.groups += 1
        assert self.do(names, form, self.folder / f"group-{self.groups}", names) == [None] * len(names)

    def form_at(self, names: list[int], host: int | None = None, address: str = "127.0.0.1") -> None:
        """A process group over a store that the first rank hosts, or the process `host` at its address."""
        (port,) = self.do([names[0] if host is None else host], host_store, address)
        assert self.do(names, form_at, address, port, names) == [None] * len(names)

    def begin(self, names: list[int], function: Callable, *arguments: object) -> None:
        """Starts processes as a group, in which each runs the function."""
        self.spawn(*names)
        self.form_at(names)
        self.succeed(names, function, *arguments)

    def signal(self, name: int, number: int) -> None:
        os.kill(self.processes[name].pid, number)


def _serve(name: int, device: torch.device, pipe) -> None:
    torch.set_num_threads(1)
    if device.type == "cuda":
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # of fewer GPUs than ranks
        torch.cuda.set_device(name % torch.cuda.device_count())
    state = SimpleNamespace(name=name, device=device, ep=None, held=[])
    while True:
        function, arguments = pipe.recv()
        try:
            result = function(state, *arguments)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        pipe.send(result)


def form(state, store: Path, names: list[int], timeout_s: float = FORM_S) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=names.index(state.name),
        world_size=len(names),
        timeout=timedelta(seconds=timeout_s),
    )


def host_store(state, address: str) -> int:
    state.store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    return state.store.port


def form_at(state, address: str, port: int, names: list[int]) -> None:
    rank = names.index(state.name)
    store = getattr(state, "store", None) or dist.TCPStore(address, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(names))


def create(state, config: epmoe.EPConfig) -> None:
    state.ep = ep = epmoe.ExpertParallel(config, device=state.device)
    state.held = ep.placement.logical_experts(ep.rank)


def serve(host: Host, ranks: int = 4, copies: int = 2) -> list[int]:
    """A group that has played."""
    names = list(range(ranks))
    host.begin(names, create, config_of(spread(ranks, copies), host.device))
    assert host.do(names, play) == ["played"] * ranks
    return names


def take(state, moves: Iterable[Move]) -> None:
    """Brings the weights where they belong: `held` names the expert whose weights lie at each index."""
    held = [*state.held, *[None] * EXPERTS][: state.ep.num_local_experts]
    for move in moves:
        held[move.local_index] = move.logical if move.source is None else state.held[move.source]
    state.held = held


def resume(state, placement: Placement | None = None, spread_lost: bool = False) -> list[tuple]:
    """Resumes and brings the weights where they belong: `held` names the expert whose weights lie at each index."""
    moves = state.ep.resume(placement=placement, spread_lost=spread_lost)
    take(state, moves)
    assert not any(move.tag for move in moves)
    return [tuple(move[:3]) for move in moves]


def play(state, rounds: int = 3) -> str:
    for seed in range(rounds):
        play_round(state, seed)
    return "played"


def play_round(
    state,
    seed: int,
    *,
    before_combine: Callable[[], None] = lambda: None,
    but: Callable[[Tokens], Tokens] = lambda tokens: tokens,
) -> None:
    """A round that agrees with the dense layer, by the weights that this rank holds, `but` for some pairs."""
    ep = state.ep
    tokens = make_tokens(ep.config, ep.rank, 5 + ep.rank, seed=seed)
    d = ep.dispatch(*(t.to(ep.device) for t in (tokens.x, tokens.ids, tokens.weights)))
    rows, ends = dequantized(d.rows, d.scales, d.dtype).clone(), d.expert_offsets.tolist()
    for i, logical in enumerate(state.held):
        rows[ends[i] : ends[i + 1]] *= gains(ep.config, rows.shape[1])[logical].to(rows)
    before_combine()
    y = ep.combine(rows, d)
    check_stream(ep)
    assert_y(y, ep.config, but(tokens))


def check_stream(ep: epmoe.ExpertParallel) -> None:
    """Checks as `ep.check` does, but waits for the current stream only: another kernel may hold the GPU."""
    if ep.device.type == "cuda":
        ended = torch.cuda.Event()
        ended.record()
        while not ended.query():
            ep.poll()
            time.sleep(1e-3)
    ep.poll()


def play_until_timeout(state, play=play) -> list[int]:
    """Returns the missing ranks."""
    while True:
        try:
            play(state)
        except epmoe.EPTimeoutError as error:
            return error.missing_ranks


def lose(host: Host, names: list[int], victim: int, number: int = signal.SIGKILL, play=play) -> list[int]:
    """One process of a group dies or stops. Returns the others, which play until they time out and name it."""
    alive = [name for name in names if name != victim]
    host.start(alive, play_until_timeout, play)
    host.signal(victim, number)
    assert host.results(alive) == [[names.index(victim)]] * len(alive)
    return alive


def survivors(state) -> list[int]:
    return state.ep.survivors()


def describe(state) -> tuple[str, int, int]:
    """The object, its generation, and how many windows this process maps."""
    return repr(state.ep), state.ep.generation, mapped_windows()


def mapped_windows() -> int:
    return sum("epmoe-window" in line for line in Path("/proc/self/maps").read_text().splitlines())


def config_of(placement: Placement, device: torch.device) -> epmoe.EPConfig:
    exchange = {"warmup_timeout_s": RESUME_S if device.type == "cpu" else 4 * RESUME_S}
    timeout_s = 1.0 if device.type == "cpu" else 5.0  # ranks may share GPUs by time slices
    config = make_config(1, experts=EXPERTS, timeout_s=timeout_s, exchange=exchange)
    return config.with_placement(placement)


def spread(ranks: int, copies: int) -> Placement:
    """Each expert on `copies` ranks in a row."""
    owners = [(p + i) % ranks for i in range(copies) for p in range(EXPERTS)]
    return Placement.build(EXPERTS, ranks, "explicit", owners, EXPERTS * (copies - 1))
