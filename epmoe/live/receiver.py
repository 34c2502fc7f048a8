"""`WeightReceiver`: a server takes versions of its weights from a trainer of other ranks, between
two rounds.

    rank 0   the newest version: TARGET
    rank r   maps and copies it beside the rounds: STAGED
    rank 0   all are staged, flip behind round n: ROUND
    rank r   the first tick behind round n + 2: flip

Why all ranks flip between the same rounds: rank 0 writes ROUND = n between its rounds n and n + 1.
A rank that has opened round n + 2 sees the word: in round n + 1 it has got tokens of rank 0, or it
has given this round up, and has waited before the next one until rank 0 had ended it. A rank that
has not does not flip. Until it has flipped, it takes no newer TARGET, which a rank 0 that gives
rounds up may write one tick before. ROUND grows with each flip, and a rank takes each value once.
It alone says that there is a flip: with a second word for the version, a rank could see the new
version beside the round of the flip before. In `load`, rank 0 takes back a ROUND whose flip is to
come.

On GPUs hosts run ahead of rounds, and replays of CUDA graphs count on the device alone. So a rank
that has staged waits at each tick for its own GPU, takes the count from there, and only then says
STAGED: rank 0 has launched all rounds so far by then, and writes ROUND behind a later one. Until
the flip the rank waits at each tick, and the same holds as above. Copies run on a stream of their
own. A flip copies into the weights, whose addresses graphs have, while no round runs. On CPUs the
same steps find nothing to wait for.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import c_int64
from functools import partial
from typing import Any, NoReturn, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from epmoe.exchange.exchange import Exchange, takes_turn_of_exchange
from epmoe.exchange.round_state import CLOSED
from epmoe.group.collective import naming, peers_of
from epmoe.group.errors import EPStateError
from epmoe.group.member import Member
from epmoe.group.waiting import Worker
from epmoe.live.copies import Tensors, copies_on
from epmoe.live.finite import NotFiniteError, nonfinite_rows
from epmoe.live.held import Held, HeldVersions, differences
from epmoe.live.layout import EMPTY
from epmoe.live.shared_words import shared_words
from epmoe.live.versions import (
    Version,
    computes,
    layers_to_hand_over,
    map_version,
    newest_version,
    own_folder,
    what_is_there,
)
from epmoe.local.given import name_without_wrappers
from epmoe.local.quantize import quantize_weights
from epmoe.local.spread import local_view
from epmoe.native import ops
from epmoe.native.arguments import FLOATS, FP8, dtype_name

_log = logging.getLogger("epmoe")
_LOOK_S = 0.005  # between two looks into the folder
_GLANCE_S = 1e-4  # between two looks at the thread
_TARGET, _ROUND, _STAGED = range(3)  # words; one of the last kind for each rank
_NONE = -1  # a version, or a round
_SCALES = {"w_gate_up": "gate_up_scales", "w_down": "down_scales"}


class Serving(Member, Protocol):
    """What a `WeightReceiver` uses of an `ExpertParallel`."""

    device: torch.device
    live: Any
    versions: HeldVersions

    def logical_experts(self, tag: int = 0) -> list[int]: ...


class WeightReceiver:
    """Takes the versions that `WeightSender`s of a trainer leave in a folder. All ranks make one,
    and call `tick`.

    The trainer has any number of ranks and any placement; experts come from it in fp32, fp16 or
    bf16, and become what this model has: the same, or fp8 in blocks. A version reaches all ranks
    between the same two rounds. What fails before, such as a trainer that dies, leaves the version
    that serves.

    Making one is collective. It loads the newest version, if there is one, before it returns. Make
    a new one after `resume`, `recover` and `resize`.

    Args:
        ep: of the model, without `placement.live`.
        model: whose layers are the trainer's by their names.
        folder: the trainer's.
        spare: whether ranks have memory for a second set of their experts. A thread then fills it
            while rounds go on, and a flip swaps the two, or on GPUs copies within the memory of the
            GPU: weights keep the addresses that CUDA graphs have. Without it, a flip copies the
            weights from the trainer, and lasts as long as that.
        dense: takes the other weights of a version at the flip, by name, on all ranks. Names are
            those of `model.state_dict()`, where it has them with or without wrappers of torch; else
            the sender's without wrappers. It must be given where the trainer sends such weights;
            and where it returns what `load_state_dict(…, strict=False)` does, one at least must
            have been taken. If it, a
            copy or a signal handler raises in a flip, so does `tick`, and this rank has weights of
            two versions: call `tick` again before the next round, which does the flip again, or end
            the rank.
        check_finite: whether a version is passed over that has NaN or Inf in experts, in the dtype
            that they have here, or in `dense`. `problem` then says where. The look is one more read
            of the version.
        version: the number of the weights that the host has loaded itself, the same on all ranks;
            None: what former receivers have brought, which `ep` knows.

    Attributes:
        version: that serves; −1: weights that no receiver has brought.
        pause_s: how long the last flip took, callback included, and on GPUs until the GPU had done
            it.
        problem: why the last version was not taken, or None. The next one is. Where that was for
            what one rank has, others name this rank.

    Raises:
        ValueError: `ep` has experts that move, the model has other experts, or a version does not
            fit; on all ranks.
        PermissionError: another user owns the folder, or can write into it.
        EPStateError: the folder has no whole version that ranks could take, and they hold different
            ones: such as after a death in the middle of a flip, with a rank that has joined, or
            where `recover` has loaded lost experts. It says who holds what.
        EPTimeoutError: ranks ended or did not come within `exchange.warmup_timeout_s`. It names
            them.
    """

    _writes = False  # into memory that no version has

    def __init__(
        self,
        ep: Serving,
        model: nn.Module,
        folder: str | os.PathLike[str],
        *,
        spare: bool = True,
        dense: Callable[[Tensors], object] | None = None,
        check_finite: bool = True,
        version: int | None = None,
    ) -> None:
        self._ep, self._generation, self._dense = ep, ep.generation, dense
        self._check_finite = check_finite
        self.version, self.pause_s = _NONE, 0.0
        self.problem: BaseException | None = None
        self._target = _NONE
        self._flipped_behind = _NONE  # the last ROUND that this rank has taken
        self._begun = _NONE  # the last version that the thread has begun to stage
        self._staged: Version | None = None  # the thread's, until the flip
        self._looked = 0.0
        self._layers: dict[str, Any] = {}
        peers = peers_of(ep)
        with naming("WeightReceiver", [ep]), peers.together(self._settle_versions):
            if ep.live is not None:
                raise ValueError(
                    "`ep` must have experts that stay where they are, to receive weights"
                )
            self._layers, self._folder = layers_to_hand_over(model), own_folder(folder)
            self._copies = copies_on(ep.device)
            weights = self._weights()
            self._own = {
                name: {each: weight.data for each, weight in one.items()}
                for name, one in weights.items()
            }
            self._spare = {name: _like(one) for name, one in weights.items()} if spare else None
            self._free = (
                self._spare
            )  # which of the two is staged, and stays so however often the flip begins
            self._await_device()  # on other streams torch may have given this memory away before
            self._words = shared_words(self._folder, peers, _STAGED + ep.size, _NONE)
            self._glance = (c_int64 * _STAGED).from_address(self._words.data_ptr())
            self._worker = Worker("epmoe-weights")
            self._worker.submit(self._copies.begin_thread)
            self._check_state()
            self._names = _names_of_state(model)
            for former in list(_open):
                if not former._of_other_layers(self._layers.values()):
                    former.close()  # its thread takes memory for free that will serve
            _open.add(self)
            if version is not None:
                ep.versions.put(self._layers.values(), Held(version, ""))
            if not self._take_newest(peers, 0, 0.0):
                self._go_on_with_held(peers)

    def load(self, version: int, timeout_s: float = 60.0) -> None:
        """Wait for a version, and take it or a newer one before this returns. Collective, between
        the same rounds.

        For loops in which a rollout must have the weights of the last step. Raises TimeoutError, or
        RuntimeError on other ranks, where the version does not come in time; and what `tick` and
        making a receiver raise: call again.
        """
        with naming("load", [self._ep]), (peers := peers_of(self._ep)).together():
            if not self._take_newest(peers, version, timeout_s):
                what = (
                    f"version {version} of the weights did not come into {self._folder} within "
                    f"{timeout_s} s"
                )
                passed = "" if self.problem is None else f"; {self.problem}"
                raise TimeoutError(f"{what}: {what_is_there(self._folder)}{passed}")

    @property
    def exchange(self) -> Exchange:
        """The exchange of `ep`."""
        exchange: Exchange = self._ep.exchange
        return exchange

    @takes_turn_of_exchange
    def tick(self) -> bool:
        """One step between two forward passes, which all ranks call between the same rounds. It
        waits for no rank; on GPUs, from when this rank has a version until all have it, for the
        rounds that this rank has launched.

        Returns:
            Whether this call has flipped to a version: on all ranks it is this one.

        Raises EPStateError in an open round, and where the group has changed; and what `dense`
        raises.
        """
        self._check_state()
        if self._has_nothing_to_do():
            return False
        ep = self._ep
        count = self.exchange.rounds.count
        target, behind, *staged = ops.read_words(self._words).tolist()
        ours = self._staged
        if (
            ours is not None
            and self.version < ours.number == self._target
            and _failed(ours.number) not in staged
        ):
            self._await_device()  # a flip to it may come
            count = self.exchange.health(wait=False).rounds
            self._post(_STAGED + ep.rank, ours.number)
            target, behind, *staged = ops.read_words(self._words).tolist()
        flips = self._flipped_behind < behind < count - 1
        if flips:
            assert self._staged is not None, "ROUND comes once all ranks have staged"
            self._flip(self._staged)
            self._staged, self._flipped_behind = None, behind
        if behind <= self._flipped_behind:  # no flip is to come
            if target > self._target:
                self._worker.submit(partial(self._stage_and_say, target))
                self._target = (
                    target  # at last: after an exception before it the next tick does this again
                )
            elif target > self.version and self.problem is None:
                self._hear_of(target, staged)
            if ep.rank == 0:
                self._decide(target, staged, count)
        return flips

    def close(self) -> None:
        """End the thread, and let go of what is mapped. The version that serves stays.

        It waits for a copy of the thread that is under way, and not for a map.
        """
        self._generation = _NONE  # before the look: the thread looks the other way around
        self._worker.submit(partial(setattr, self, "_staged", None))
        self._worker.close()
        while self._writes and self._worker.lives:
            time.sleep(_GLANCE_S)

    def _go_on_with_held(self, peers: Any) -> None:
        """Serve what all ranks hold. Collective.

        Raises EPStateError where that is not one version.
        """
        mine = self._ep.versions.of(self._layers.values())
        gathered = peers.all_gather(mine)
        differ = differences([None if held is None else Held(*held) for held in gathered])
        if differ:
            remedy = (
                "let the trainer send a version and make the receiver again; or load the same "
                "weights on all ranks, and say so by `version=`"
            )
            raise EPStateError(f"ranks serve different weights, {differ}: {remedy}")
        assert mine is not None, "it has been compared"
        self._target = mine.version
        self.version = mine.version

    def _settle_versions(self) -> None:
        """All ranks have one version in these layers."""
        self._ep.versions.settle(self._layers.values())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Copies into memory that no version has, unless this object is closed."""
        self._writes = True  # before the look: see `close`
        try:
            self._check_open()
            with self._copies.running():
                yield
        finally:
            self._writes = False

    def _of_other_layers(self, layers: Iterable[nn.Module]) -> bool:
        return {*map(id, layers)}.isdisjoint(map(id, self._layers.values()))

    def _has_nothing_to_do(self) -> bool:
        """A glance at the words, in 1 µs: no flip and no version is to come. `tick` reads what has
        come in order.
        """
        target, behind = self._glance
        if not target <= self._target == self.version or behind > self._flipped_behind:
            return False
        return self._ep.rank > 0 or time.monotonic() - self._looked < _LOOK_S

    def _check_state(self) -> None:
        rounds = self.exchange.rounds
        self._check_open()
        if rounds.state != CLOSED:
            raise EPStateError(f"round {rounds.count} is open: weights change between rounds")

    @property
    def _is_open(self) -> bool:
        return self._ep.generation == self._generation

    def _check_open(self) -> None:
        if not self._is_open:
            raise EPStateError(
                "it is closed, or the group has changed: make a new WeightReceiver on all ranks"
            )

    def _stage_and_say(self, number: int) -> None:
        """Stage a version, on the thread. If that fails rank 0 is told; otherwise the next tick
        says STAGED.
        """
        if (
            number != self._begun
        ):  # otherwise after an interrupted call, which has submitted it, too
            self._begun, self._staged = number, None
            try:
                self._staged, self.problem = self._stage(number), None
            except BaseException as error:
                self.problem = error
                if self._is_open:
                    self._log_problem(number)
        if self._staged is None and number > self.version:  # not flipped to
            self._post(_STAGED + self._ep.rank, _failed(number))
            if self.problem is not None:
                traceback.clear_frames(
                    self.problem.__traceback__
                )  # which have what was mapped: copies may still run

    def _hear_of(self, target: int, staged: list[int]) -> None:
        """Say which rank has not taken a version that this rank could take."""
        failed = [rank for rank, said in enumerate(staged) if said == _failed(target)]
        if failed:
            what = f"rank {failed[0]} has not taken version {target}: its `problem` says why"
            self.problem = EPStateError(what)

    def _log_problem(self, number: int) -> None:
        _log.warning("version %d of the weights is not taken: %s", number, self.problem)

    def _decide(self, target: int, staged: list[int], round_number: int) -> None:
        """Rank 0 lets all ranks flip, or names another version."""
        if target > self.version and all(each == target for each in staged):
            self._post(_ROUND, round_number)
        elif target <= self.version or _failed(target) in staged:
            now = time.monotonic()
            if now - self._looked >= _LOOK_S:
                self._looked = now
                newest = newest_version(self._folder)
                if newest > max(target, self.version):
                    self._post(_TARGET, newest)

    @takes_turn_of_exchange
    def _take_newest(self, peers: Any, least: int, timeout_s: float) -> bool:
        """Take the newest version that all ranks find. Returns whether it is `least` at least, in
        time. Collective.
        """
        self._check_state()
        deadline = time.monotonic() + timeout_s
        gone = _NONE
        while True:
            found = peers.all_gather(
                (newest_version(self._folder), self.version, time.monotonic() > deadline)
            )
            newest, held = (
                found[0][0],
                min(version for _, version, _ in found),
            )  # a flip may have failed on some ranks
            if newest > max(held, least - 1, gone):
                self._await_worker()  # it writes where this version goes
                if self._ep.rank == 0:
                    self._post(
                        _ROUND, _NONE
                    )  # calls off a flip that is to come: for all ranks, also if one raises
                peers.all_gather(None)
                self._target = (
                    self.version
                )  # wherever this is interrupted, ticks stage it again, or say what is staged
                self._post(_STAGED + self._ep.rank, _NONE)
                self._staged = None
                self._begun = _NONE
                staged = None
                why = ""
                try:
                    staged = self._stage(newest)
                except FileNotFoundError:
                    pass  # it went with its trainer, or since there is a newer one
                except NotFiniteError as error:
                    why = str(error)
                outcomes = peers.all_gather((staged is not None, why))
                self.problem = next((NotFiniteError(why) for _, why in outcomes if why), None)
                if staged is not None and all(has for has, _ in outcomes):
                    self._flip(staged)
                    self._target = newest
                    return True
                if self.problem is not None:
                    self._log_problem(newest)
                gone = newest
            elif held >= least or found[0][2]:
                return held >= least
            else:
                time.sleep(_LOOK_S)

    def _stage(self, number: int) -> Version:
        """Map a version, and copy it where there is memory. Raises ValueError where it does not
        fit.
        """
        with self._copies.running():
            version = map_version(self._folder, number, self._copies.memory)
            own = self._own
            now = self._weights()
            odd = sorted(now.keys() ^ version.experts.keys())
            if odd:
                raise ValueError(
                    f"`model` and version {number} must have the same layers: one has no {odd[0]!r}"
                )
            for name, weights in now.items():
                _check(
                    name,
                    version,
                    self._layers[name].experts,
                    weights,
                    self._ep.config.model.num_experts,
                )
            if version.dense and self._dense is None:
                raise ValueError(
                    f"version {number} has dense weights, such as {next(iter(version.dense))!r}: "
                    "`dense` must take them"
                )
            if self._check_finite:
                self._check_values(version, now)
        spare = self._spare
        if spare is not None:
            with self._writing():
                self._free = {
                    name: self._copies.free(own[name], spare[name], now[name]) for name in now
                }
                self._copy(version, self._free)
        return version

    def _flip(self, version: Version) -> None:
        self._await_device()
        start = time.perf_counter()
        layers = self._layers.values()
        self._ep.versions.put(layers, None)  # until all is there
        with self._copies.running():
            if self._free is None:
                self._copy(version, self._weights())
            else:
                for name, weights in self._weights().items():
                    self._copies.use(self._free[name], weights)
        if self._dense is not None:
            named = {self._names.get(name, name): each for name, each in version.dense.items()}
            taken = self._dense(self._copies.owned(named))  # it may keep them
            _check_taken(named, taken)
        self._await_device()
        self._ep.versions.put(layers, Held(version.number, version.trainer))
        self.version = version.number
        self.pause_s = time.perf_counter() - start

    @torch.inference_mode()
    def _copy(self, version: Version, to: Mapping[str, Tensors]) -> None:
        for name in self._layers:
            if self._writes:  # otherwise it is a flip, which ends
                self._check_open()
            for each, begin, rows in self._rows(version, name):
                target = to[name][each][begin : begin + len(rows)]
                if target.dtype == FP8:
                    for i, quantized in enumerate(map(quantize_weights, rows)):
                        target[i].copy_(quantized.q)
                        to[name][_SCALES[each]][begin + i].copy_(quantized.scales)
                else:
                    target.copy_(rows)

    def _rows(self, version: Version, name: str) -> Iterator[tuple[str, int, Tensor]]:
        """What a version has for this rank's experts of a layer: the name of a weight, the first
        row here, and values.
        """
        places = {
            expert: (part.weights, i)
            for part in version.experts[name]
            for i, expert in enumerate(part.held)
        }
        for begin, end, weights, first in _runs([places[expert] for expert in self._held(name)]):
            for each, values in weights.items():
                yield each, begin, values[first : first + end - begin]

    @torch.inference_mode()
    def _check_values(self, version: Version, to: Mapping[str, Tensors]) -> None:
        """Raises NotFiniteError, which says where the first value is that is not finite here."""
        for name in self._layers:
            held = self._held(name)
            for each, begin, rows in self._rows(version, name):
                dtype = to[name][each].dtype
                if dtype == FP8:
                    dtype = rows.dtype  # its scales take any finite values
                odd = nonfinite_rows(rows, dtype)
                if odd:
                    where = f"`{each}` of expert {held[begin + odd[0]]} of {name!r}"
                    _raise_not_finite(version, dtype, where)
        for name, value in version.dense.items():
            if nonfinite_rows(value[None], value.dtype):
                _raise_not_finite(version, value.dtype, f"`dense[{name!r}]`")

    def _await_worker(self) -> None:
        idle = self._worker.submit(lambda: None)
        deadline = (
            time.monotonic() + self._ep.config.exchange.warmup_timeout_s / 2
        )  # other ranks hear of it in time
        while not idle.done:
            if time.monotonic() > deadline:
                raise TimeoutError("an earlier version of the weights is still on its way")
            time.sleep(_GLANCE_S)

    def _await_device(self) -> None:
        self.exchange.wait_for_device(self.exchange.deadlines.wait_s())

    def _weights(self) -> dict[str, Tensors]:
        return {name: _weights_of(layer.experts) for name, layer in self._layers.items()}

    def _held(self, name: str) -> list[int]:
        """The logical experts of this rank's rows."""
        return self._ep.logical_experts(self._layers[name].tag)

    def _post(self, word: int, value: int) -> None:
        ops.post_word(self._words.view(torch.uint8), 8 * word, value)


_open = WeakSet[WeightReceiver]()


def _names_of_state(model: nn.Module) -> dict[str, str]:
    """The names in a model's state dict, by those without wrappers, of which the trainer has
    others.
    """
    names = list(model.state_dict(keep_vars=True))
    counts = Counter(map(name_without_wrappers, names))
    by_plain = {name_without_wrappers(name): name for name in names}
    return {plain: name for plain, name in by_plain.items() if counts[plain] == 1}


def _check_taken(dense: Mapping[str, Tensor], taken: object) -> None:
    """`taken` is what `load_state_dict` returns, or anything else."""
    unexpected = getattr(taken, "unexpected_keys", ())
    if dense and dense.keys() <= {*unexpected}:
        raise ValueError(
            f"`dense` has taken no weight, since the model has no such names: {sorted(dense)[:3]}"
        )


def _raise_not_finite(version: Version, dtype: torch.dtype, where: str) -> NoReturn:
    what = f"version {version.number} has values that are not finite in {dtype_name(dtype)}"
    raise NotFiniteError(f"{what}: {where}")


def _failed(version: int) -> int:
    return -2 - version


def _weights_of(experts: Any) -> Tensors:
    """This rank's rows of the parameters, whose memory a flip changes. Raises ValueError for what
    nobody makes.
    """
    if experts.is_quantized and not experts.is_fp8 or experts.dtype not in FLOATS:
        raise ValueError(
            "`model` must have experts in fp32, fp16, bf16 or fp8 to receive weights, got "
            f"{experts}"
        )
    with torch.no_grad():
        return {name: local_view(value) for name, value in experts.named_parameters()}


def _like(weights: Tensors) -> Tensors:
    with torch.inference_mode(next(iter(weights.values())).is_inference()):
        return {name: torch.empty_like(weight) for name, weight in weights.items()}


def _runs(places: list[tuple[Tensors, int]]) -> Iterator[tuple[int, int, Tensors, int]]:
    """Rows begin … end whose places follow one another in the same tensors, and these and the first
    place there.
    """
    begin = 0
    for end in range(1, len(places) + 1):
        weights, first = places[begin]
        if (
            end == len(places)
            or places[end][0] is not weights
            or places[end][1] != first + end - begin
        ):
            yield begin, end, weights, first
            begin = end


def _check(name: str, version: Version, experts: Any, weights: Tensors, num_experts: int) -> None:
    parts = version.experts[name]
    sent = {expert for part in parts for expert in part.held} - {EMPTY}
    shapes = {
        each: tuple(value.shape[1:])
        for each, value in weights.items()
        if each not in _SCALES.values()
    }
    if sent != {*range(num_experts)}:
        raise ValueError(
            f"version {version.number} must have {num_experts} experts of {name!r}, got {len(sent)}"
        )
    for part in parts:
        got = {each: tuple(value.shape[1:]) for each, value in part.weights.items()}
        if got != shapes or part.computes != computes(experts):
            wanted = f"{shapes} that compute {computes(experts)}"
            raise ValueError(
                f"experts of {name!r} must have {wanted}, got {got} that compute {part.computes}"
            )
