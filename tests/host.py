"""A host of ranks that resume: it starts processes, and says what each of them runs, step by step.

Ranks have the weights of their experts as rows, which multiply tokens. Experts stay where they are
(`staying`), or move (`moving`).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import torch
import torch.distributed as dist
from captured import Captured
from exchanges import Tokens, assert_y, gains, given, make_config, make_tokens
from launched import context
from slot_tables import times_slots
from waits import LONG_S, until

import epmoe
import epmoe.group.recovery
import epmoe.life.life
import epmoe.life.membership
import epmoe.rail.opening
from epmoe import Move, Placement
from epmoe.group.board import Board, Meeting
from epmoe.group.peers import Peers
from epmoe.group.store import OutlivingStore
from epmoe.live.experts import LiveExperts
from epmoe.live.layout import EMPTY

EXPERTS = 8  # that stay
E, L, S = 4, 2, 3  # experts, layers, and slots of a rank, of experts that move
FORM_S = 60.0  # the deadline of a process group
ANSWER_S = 240.0  # a process that takes longer hangs
STACKS_S = 1.0  # to write the stacks of a process, whose end nobody is told
BEGUN = "begun"
"""The first answer of a process."""


class Host:
    """Processes by number, of which each runs one function at a time: `function(state,
    *arguments)`. None may take longer than `answer_s` to answer.
    """

    def __init__(self, folder: Path, device: torch.device, answer_s: float = ANSWER_S):
        self.folder = folder
        self.device = device
        self.answer_s = answer_s
        self.processes = {}
        self.pipes = {}
        self.groups = self.arrivals = 0
        # Processes that have not given their first answer yet.
        self._beginning = set[int]()

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
            self.processes[name] = context.Process(
                target=_serve,
                args=(name, self.device, theirs, self._stacks_of(name)),
                daemon=True,
            )
            self.processes[name].start()
            self._beginning.add(name)
            theirs.close()

    def start(self, names: list[int], function: Callable, *arguments: object) -> None:
        # A new process may take long to begin: that is no part of what it is asked for.
        for name in names:
            if name in self._beginning:
                assert self.results([name]) == [BEGUN]
                self._beginning.remove(name)
        for name in names:
            self.pipes[name].send((function, arguments))

    def results(self, names: list[int]) -> list:
        deadline = time.monotonic() + self.answer_s
        for name in names:
            if not self.pipes[name].poll(max(0.0, deadline - time.monotonic())):
                raise self.hang(f"process {name} does not answer")
        return [self.pipes[name].recv() for name in names]

    def hang(self, what: str) -> AssertionError:
        """The error of a wait that was in vain. It prints where every process is."""
        asked = []
        for name, process in self.processes.items():
            if process.is_alive() and name not in self._beginning:
                self.signal(name, signal.SIGUSR1)
                asked.append(name)
        time.sleep(STACKS_S)
        stacks = [f"Process {name} is at\n{self._stacks_of(name).read_text()}" for name in asked]
        print("\n".join(stacks), flush=True)
        return AssertionError(f"{what}; the stacks of all are above")

    def _stacks_of(self, name: int) -> Path:
        return self.folder / f"stacks-{name}"

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

    def play(self, names: list[int]) -> None:
        """Rounds, which agree with the dense layer."""
        self.succeed(names, play)

    def form(self, names: list[int]) -> None:
        """A process group over a file."""
        self.groups += 1
        assert self.do(names, form, self.folder / f"group-{self.groups}", names) == [None] * len(
            names
        )

    def form_at(
        self, names: list[int], host: int | None = None, address: str = "127.0.0.1"
    ) -> None:
        """A process group over a store that the first rank hosts, or the process `host` at its
        address.
        """
        (port,) = self.do([names[0] if host is None else host], host_store, address)
        assert self.do(names, form_at, address, port, names) == [None] * len(names)

    def begin(self, config: epmoe.EPConfig) -> list[int]:
        """Starts the processes of a group, which plays."""
        names = list(range(config.topology.ep_size))
        self.spawn(*names)
        self.form_at(names)
        self.succeed(names, create, config)
        self.play(names)
        return names

    def wait_for_arrivals(self, new: int) -> None:
        """So many more processes have come to `join_group`."""
        root = Board(OutlivingStore(self.folder), "epmoe")
        self.arrivals += new
        if new:
            until(lambda: root.read(f"arrivals/{self.arrivals}"))

    def take_in(
        self, names: list[int], new: list[int], function: Callable, *arguments: object
    ) -> list[list]:
        """New ranks join, while the others call a function. Returns what it returns, and the
        experts of the new.
        """
        self.spawn(*new)
        self.start(new, come, self.folder)
        self.wait_for_arrivals(len(new))
        self.start(names, function, self.folder, len(names) + len(new), *arguments)
        return [self.answers(names), self.answers(new)]

    def in_order(self, names: list[int]) -> list[int]:
        """The processes by their ranks."""
        return [name for _, name in sorted(zip(self.succeed(names, rank), names, strict=True))]

    def signal(self, name: int, number: int) -> None:
        os.kill(self.processes[name].pid, number)


def _serve(name: int, device: torch.device, pipe, stacks: Path) -> None:
    # A process that hangs is asked where, see `Host.hang`.
    faulthandler.register(signal.SIGUSR1, file=stacks.open("w"))
    pipe.send(BEGUN)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(name % torch.cuda.device_count())
    state = SimpleNamespace(name=name, device=device, ep=None)
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


def staying(
    placement: Placement, device: torch.device, timeout_s: float = LONG_S, resume_s: float = LONG_S
) -> epmoe.EPConfig:
    """The deadlines are those of a round and of `resume`. A death is seen at once."""
    if device.type == "cuda":
        # Ranks may share GPUs by time slices.
        timeout_s = 5.0
        resume_s = 16.0
    exchange = {"warmup_timeout_s": resume_s}
    config = make_config(1, experts=EXPERTS, timeout_s=min(timeout_s, resume_s), exchange=exchange)
    return config.with_placement(placement)


def spread(ranks: int, copies: int) -> Placement:
    """Each expert on `copies` ranks in a row."""
    owners = [(p + i) % ranks for i in range(copies) for p in range(EXPERTS)]
    return Placement.build(EXPERTS, ranks, "explicit", owners, EXPERTS * (copies - 1))


def moving(
    ranks: int,
    slots: int = S,
    file: Path | None = None,
    seats: int | None = None,
    timeout_s: float = FORM_S,
    form_s: float = FORM_S,
) -> epmoe.EPConfig:
    placement = {
        "live": True,
        "slots_per_rank": slots,
        "layers": L,
        "staging_mb": 1,
        "slots": file and str(file),
    }
    exchange = {"warmup_timeout_s": form_s}
    return make_config(
        ranks,
        experts=E,
        top_k=2,
        timeout_s=timeout_s,
        placement=placement,
        exchange=exchange,
        max_ranks=seats,
    )


def serve(host: Host, ranks: int = 4, copies: int = 2, **deadlines: float) -> list[int]:
    """A group whose experts stay, and which has played. `deadlines` are those of `staying`."""
    return host.begin(staying(spread(ranks, copies), host.device, **deadlines))


def create(state, config: epmoe.EPConfig) -> None:
    start(state, epmoe.ExpertParallel(config, device=state.device))


def start(state, ep: epmoe.ExpertParallel) -> None:
    """This rank has the weights that `ep` says are its own: `rows` [L, slots, D]."""
    state.ep = ep
    state.rows = torch.empty(ep.config.placement.layers, 0, ep.config.model.hidden_size)
    # `gone`: the memory of groups up to this generation has gone.
    state.captured = list[Captured]()
    state.gone = -1
    held = [
        (slot, expert, tag)
        for tag in tags(ep)
        for slot, expert in enumerate(ep.logical_experts(tag))
    ]
    take(state, [Move(slot, expert, None, tag) for slot, expert, tag in held if expert != EMPTY])
    if ep.config.placement.live:
        state.balancer = epmoe.Balancer(ep, every=3, weights=partial(weights, state))
        state.balancer.tick()


def come(state, folder: Path) -> list[list[int]]:
    """A new rank joins. Returns the experts of each layer that it is to load."""
    start(state, epmoe.join_group(folder, device=state.device, timeout_s=60))
    return [state.ep.logical_experts(tag) for tag in tags(state.ep)]


def captures(state) -> list[int]:
    """The generations in which this rank has captured rounds."""
    return [one.generation for one in state.captured]


def tags(ep: epmoe.ExpertParallel) -> Sequence[int]:
    return range(1, ep.config.placement.layers + 1) if ep.config.placement.live else [0]


def read(config: epmoe.EPConfig, tag: int, logical: int) -> torch.Tensor:
    """The weights [D] of an expert; each layer has others."""
    return gains(config, config.model.hidden_size)[logical] * 2.0**tag


def weights(state, tag: int, slot: int) -> list[torch.Tensor]:
    return [state.rows[tag - 1, slot]]


def take(state, moves: Iterable[Move], loaded: list[tuple[int, int]] | None = None) -> None:
    """Brings the weights where they belong. `loaded` gets (tag, expert) of what is read; what no
    slot holds is NaN.
    """
    ep = state.ep
    before = state.rows
    state.rows = rows = torch.full(
        (len(before), ep.num_local_experts, before.shape[2]), torch.nan, device=ep.device
    )
    # Slots that stay keep their rows.
    stay = min(before.shape[1], rows.shape[1])
    rows[:, :stay] = before[:, :stay]
    # Rows that come are read, or are those of another slot.
    for slot, logical, source, tag in moves:
        assert (
            ep.logical_experts(tag)[slot] == logical
            and (tag in tags(ep))
            and (source is None or not tag)
        )
        layer = max(tag - 1, 0)
        rows[layer, slot] = (
            read(ep.config, tag, logical) if source is None else before[layer, source]
        )
        if source is None and loaded is not None:
            loaded.append((tag, logical))
    # Empty slots hold nothing.
    for layer, tag in enumerate(tags(ep)):
        rows[layer, [expert == EMPTY for expert in ep.logical_experts(tag)]] = torch.nan


def resume(state, placement: Placement | None = None, spread_lost: bool = False) -> list[tuple]:
    """Resumes and brings the weights where they belong."""
    moves = state.ep.resume(placement=placement, spread_lost=spread_lost)
    take(state, moves)
    return [tuple(move[:3]) for move in moves]


def resume_all(host: Host, names: list[int], *arguments: object) -> list[list[tuple]]:
    """The processes form a group by hand, resume and play. Returns the moves of each."""
    host.form(names)
    moves = host.succeed(names, resume, *arguments)
    host.play(names)
    return moves


def go_on(
    state, folder: Path, min_ranks: int = 1, last_call_s: float = 10.0
) -> list[tuple[int, int]]:
    """Recovers. Returns (tag, expert) of what had to be loaded."""
    loaded = list[tuple[int, int]]()
    load = partial(take, state, loaded=loaded)
    epmoe.recover(state.ep, folder, load, min_ranks=min_ranks, max_ranks=4, last_call_s=last_call_s)
    return loaded


def resize(
    state, folder: Path, size: int, wait_s: float = 20.0, balanced: bool = False
) -> list | bool:
    """(tag, expert) of what had to be loaded; False on a rank that has left."""
    loaded = list[tuple[int, int]]()
    options = {"weights": partial(weights, state)} if state.ep.config.placement.live else {}
    if balanced:
        options["balancer"] = state.balancer
    stays = epmoe.resize(
        state.ep, folder, size, partial(take, state, loaded=loaded), wait_s=wait_s, **options
    )
    return stays and loaded


def sleep(state, *free: Callable[[], object]) -> int:
    """Returns the bytes that the plan says."""
    planned = state.ep.memory_plan().total_bytes
    state.gone = state.ep.generation
    state.ep.sleep(*free)
    return planned


def play(state, rounds: int = 2 * L) -> str:
    """Rounds by calls, and by a replay. What this rank has captured in other groups
    does nothing.
    """
    ep = state.ep
    for seed in range(rounds):
        play_round(state, seed)
    replay(state)
    for one in state.captured:
        if one.generation > state.gone and one.is_outdated(ep):
            one.assert_told(ep)
    return "played"


def replay(state) -> None:
    """A round of each layer, as this rank has captured it in a group like this one; otherwise it
    captures it now.
    """
    ep = state.ep
    if ep.exchange.layout is None:  # over several nodes
        return play_round(state, 0)
    # The capture that is valid here, if any.
    good = next((one for one in state.captured if ep.capture_is_valid(one.generation)), None)
    if good is None:
        state.captured.append(Captured(ep, tags(ep), state.rows))
        return check_stream(ep)
    good.replay(ep, state.rows)
    check_stream(ep)
    good.assert_right(ep)


def play_round(
    state,
    seed: int,
    *,
    before_combine: Callable[[], None] = lambda: None,
    but: Callable[[Tokens], Tokens] = lambda tokens: tokens,
) -> None:
    """A round that agrees with the dense layer, by the weights that this rank holds, `but` for some
    pairs.
    """
    ep = state.ep
    layer = seed % len(state.rows)
    tag = tags(ep)[layer]
    tokens = make_tokens(ep.config, ep.rank, 5 + ep.rank, seed=seed)
    d = ep.dispatch(*given(ep, tokens), tag=tag)
    rows = times_slots(d, state.rows[layer])
    before_combine()
    y = ep.combine(rows, d)
    check_stream(ep)
    assert_y(y / 2.0**tag, ep.config, but(tokens))


def check_stream(ep: epmoe.ExpertParallel) -> None:
    """Checks as `ep.check` does, but waits for the current stream only: another kernel may hold the
    GPU. Experts that move get no further.
    """
    if ep.device.type == "cuda":
        ended = torch.cuda.Event()
        ended.record()
        while not ended.query():
            ep.exchange.poll()
            time.sleep(1e-3)
    ep.exchange.poll()


def play_until_timeout(state) -> list[int]:
    """Returns the missing ranks."""
    while True:
        try:
            play(state)
        except epmoe.EPTimeoutError as error:
            return error.missing_ranks


def lose(host: Host, names: list[int], victim: int, number: int = signal.SIGKILL) -> list[int]:
    """One process of a group dies or stops. Returns the others, which play until they time out,
    name it, and see who is left.
    """
    alive = [name for name in names if name != victim]
    host.start(alive, play_until_timeout)
    host.signal(victim, number)
    assert host.results(alive) == [[names.index(victim)]] * len(alive)
    assert host.do(alive, survivors) == [
        [r for r, name in enumerate(names) if name != victim]
    ] * len(alive)
    return alive


def survivors(state) -> list[int]:
    return state.ep.survivors()


def rank(state) -> int:
    return state.ep.rank


def describe(state) -> tuple[str, int, int]:
    """The object, its generation, and how many windows this process maps."""
    return repr(state.ep), state.ep.generation, mapped_windows()


def mapped_windows() -> int:
    return sum("epmoe-window" in line for line in Path("/proc/self/maps").read_text().splitlines())


STEPS = {
    "hands over": (LiveExperts, "_begin"),
    "decides": (epmoe.group.recovery, "_meet"),
    "connects": (dist, "init_process_group"),
    "has half a group": (dist.distributed_c10d, "_update_default_pg"),
    "checks": (epmoe.life.membership, "check_size"),
    "opens": (Peers, "all_gather"),
    # The others have closed their windows so far by then.
    "maps": (epmoe.life.life, "open_exchange"),
    "opens its window": (epmoe.rail.opening, "open_window"),
    "has windows": (epmoe.rail.opening, "NodeExchange"),
    "confirms": (Meeting, "confirm"),
    "leaves": (epmoe.ExpertParallel, "close"),
}
"""Steps of a rank on its way into a group, or out of it."""


def fail_in(state, step: str, fails: Callable[[], object]) -> None:
    """When this rank next comes to a step, it calls `fails` first, once."""
    owner, name = STEPS[step]
    before = getattr(owner, name)

    def failing(*arguments: object, **options: object) -> object:
        setattr(owner, name, before)
        fails()
        return before(*arguments, **options)

    setattr(owner, name, failing)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


REACHED = {
    "drop": lambda version, copied: version >= 0,
    "copy": lambda version, copied: copied >= 1,
    "add": lambda version, copied: version >= 1,
}
"""Stages of a move: experts are dropped, weights are copied, they are ready."""


def begin_to_move(host: Host, names: list[int], stage: str, who: int) -> None:
    """Each rank is to hold the experts after those that it holds, until process `who` has reached a
    stage.
    """
    host.succeed(names, rotate)
    until(lambda: REACHED[stage](*host.succeed(names, poll)[names.index(who)]))


def rotate(state) -> None:
    slots = torch.where(state.ep.slots == EMPTY, EMPTY, (state.ep.slots + 1) % E)
    state.moves = state.ep.replace(slots, partial(weights, state))


def fill(state) -> None:
    """Leaves no slot empty."""
    P = state.ep.slots.shape[1]
    state.ep.replace((torch.arange(P) % E).expand(L, -1), partial(weights, state))
    state.ep.apply()


def poll(state) -> tuple[int, int]:
    """One step: its version, and bytes that have been copied here."""
    state.ep.poll()
    return state.moves.version, state.moves.copied_bytes


def finish(state) -> None:
    state.ep.apply()


def balance(state) -> int:
    """The balancer goes on, also one of an earlier group. Returns how often it has planned."""
    for _ in range(30):
        play(state)
        state.balancer.tick()
    state.balancer.finish()
    return len(state.balancer.history)


def table(state) -> list[list[int]]:
    return state.ep.slots.tolist()


def all_held(host: Host, names: list[int]) -> list[list[int]]:
    """The table of slots: the same on all ranks, and with all experts."""
    tables = host.succeed(names, table)
    assert all(one == tables[0] for one in tables)
    assert all(set(range(E)) <= set(layer) for layer in tables[0])
    return tables[0]
