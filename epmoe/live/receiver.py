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
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from epmoe.exchange.copies import Tensors
from epmoe.exchange.exchange import Exchange, takes_turn_of_exchange
from epmoe.exchange.processors import processor_of
from epmoe.exchange.round_state import CLOSED
from epmoe.group.collective import naming, peers_of
from epmoe.group.errors import EPStateError
from epmoe.group.member import Member
from epmoe.group.waiting import Worker
from epmoe.live.finite import NotFiniteError, nonfinite_rows
from epmoe.live.flip_words import NONE, FlipWords, Report, Words, outcome
from epmoe.live.held import Held, HeldVersions, differences
from epmoe.live.versions import (
    Version,
    check_all_experts,
    computes,
    layers_to_hand_over,
    map_version,
    newest_version,
    own_folder,
    what_is_there,
)
from epmoe.local.contexts import name_without_wrappers
from epmoe.local.quantize import quantize_weights
from epmoe.local.spread import local_view
from epmoe.native.arguments import FLOATS, FP8, dtype_name

_log = logging.getLogger("epmoe")
# Between two looks into the folder.
_LOOK_S = 0.005
# Between two looks at the thread.
_GLANCE_S = 1e-4
# Names of the scales, by the fp8 weights that have them.
_SCALES = {"w_gate_up": "gate_up_scales", "w_down": "down_scales"}


class _Sight(NamedTuple):
    """What one rank sees in a collective call."""

    newest: int
    """the newest whole version in the folder"""
    version: int
    """the version that serves on the rank"""
    is_late: bool
    """whether the time of the call has passed"""


class _Run(NamedTuple):
    """Rows that follow one another both on a rank and in a version."""

    begin: int
    """the first row of the rank"""
    num_rows: int
    weights: Tensors
    """the tensors of the version"""
    first: int
    """the first row there"""


class _Place(NamedTuple):
    """Where a version has the weights of an expert."""

    weights: Tensors
    row: int


class _Rows(NamedTuple):
    """Rows of one weight, for experts of this rank."""

    weight: str
    """the name of the weight"""
    begin: int
    """the first row on this rank"""
    values: Tensor


class Serving(Member, Protocol):
    """The part of an `ExpertParallel` that a `WeightReceiver` uses."""

    device: torch.device
    live: Any
    versions: HeldVersions

    def logical_experts(self, tag: int = 0) -> list[int]: ...


class WeightReceiver:
    """Takes the versions of weights that a trainer's `WeightSender`s leave in a folder. All ranks
    make one, and call `tick`.

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
            have been taken. If it, a copy or a signal handler raises in a flip, so does `tick`, and
            this rank has weights of two versions: call `tick` again before the next round, which
            does the flip again, or end the rank.
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
        self._ep = ep
        self._generation = ep.generation
        self._dense = dense
        self._check_finite = check_finite
        self.version = NONE
        self.pause_s = 0.0
        self.problem: BaseException | None = None
        # The last version that this rank has begun to take.
        self._target = NONE
        # The last ROUND that this rank has taken.
        self._flipped_behind = NONE
        # The last version that the thread has begun to stage.
        self._begun = NONE
        # The version that the thread has staged, until the flip.
        self._staged: Version | None = None
        # When rank 0 has looked into the folder last.
        self._looked = 0.0
        self._layers: dict[str, Any] = {}
        peers = peers_of(ep)
        with naming("WeightReceiver", [ep]), peers.together(self._mark_received):
            if ep.live.can_move:
                raise ValueError(
                    "`ep` must have experts that stay where they are, to receive weights"
                )
            self._layers = layers_to_hand_over(model)
            self._folder = own_folder(folder)
            self._take_memory(spare)
            self._words = FlipWords.share(self._folder, peers, self._ep.size)
            self._worker = Worker("epmoe-weights")
            self._worker.submit(self._copies.begin_thread)
            self._check_state()
            self._names = _names_of_state(model)
            self._replace_former()
            # Begin with the newest version, or with the one that all ranks hold.
            if version is not None:
                ep.versions.put(self._layers.values(), Held(version, ""))
            if not self._take_newest(peers, 0, 0.0):
                self._serve_held(peers)

    def _take_memory(self, needs_spare: bool) -> None:
        """Note the memory of the experts, and allocate a second set if the caller has room."""
        self._copies = processor_of(self._ep.device).weight_copies()
        weights = self._weights()
        self._own: dict[str, Tensors] = {}
        for layer, tensors in weights.items():
            self._own[layer] = {name: weight.data for name, weight in tensors.items()}
        self._spare: dict[str, Tensors] | None = None
        if needs_spare:
            self._spare = {layer: _like(tensors) for layer, tensors in weights.items()}
        # Which of the two sets is staged. It stays so however often the flip begins.
        self._free = self._spare
        # torch may have taken this memory from work that still runs on other streams.
        self._await_device()

    def _replace_former(self) -> None:
        """Close other receivers of these layers: their threads take memory that will serve."""
        for former in list(_open):
            if not former._has_other_layers(self._layers.values()):
                former.close()
        _open.add(self)

    def load(self, version: int, timeout_s: float = 60.0) -> None:
        """Wait for a version, and take it or a newer one before this returns. Collective, between
        the same rounds.

        For loops in which a rollout must have the weights of the last step. It also raises what
        `tick` and making a receiver raise: call it again then.

        Args:
            version: the number of `WeightSender.send`.
            timeout_s: how long to wait, in seconds.

        Raises:
            TimeoutError: the version did not come in time. Other ranks get a RuntimeError.
        """
        peers = peers_of(self._ep)
        with naming("load", [self._ep]), peers.together():
            if self._take_newest(peers, version, timeout_s):
                return
            why = what_is_there(self._folder)
            if self.problem is not None:
                why += f"; {self.problem}"
            raise TimeoutError(
                f"version {version} of the weights did not come into {self._folder} within "
                f"{timeout_s} s: {why}"
            )

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
        round_number = self.exchange.rounds.count
        words = self._words.read()
        # Report a version as staged once the rounds so far have run: a flip to it may come.
        staged = self._staged
        if staged is not None and self._may_report(staged.number, words):
            self._await_device()
            round_number = self.exchange.health(wait=False).rounds
            self._words.report(staged.number, is_staged=True)
            words = self._words.read()
        # Flip once this rank has opened the second round behind ROUND.
        flips = self._flipped_behind < words.flip_round < round_number - 1
        if flips:
            assert self._staged is not None, "ROUND comes once all ranks have staged"
            self._flip(self._staged)
            # Both at once: interrupted between them, the next tick would flip to nothing.
            self._staged, self._flipped_behind = None, words.flip_round
        # A newer version waits for the flip that is to come.
        is_flip_to_come = words.flip_round > self._flipped_behind
        if not is_flip_to_come:
            self._go_to_target(words)
            if self._ep.rank == 0:
                self._decide(words, round_number)
        return flips

    def _may_report(self, number: int, words: Words) -> bool:
        """Whether to report a version as staged: it has not served, and no rank has failed."""
        is_wanted = self.version < number == self._target
        return is_wanted and not words.ranks_that_failed(number)

    def _go_to_target(self, words: Words) -> None:
        """Begin to stage the version that rank 0 asks for, or learn why nobody takes it."""
        if words.target > self._target:
            self._worker.submit(partial(self._stage_and_report, words.target))
            # Last: after an exception before it the next tick does this again.
            self._target = words.target
        elif words.target > self.version and self.problem is None:
            self._learn_of_failure(words)

    def close(self) -> None:
        """End the thread, and let go of what is mapped. The version that serves stays.

        It waits for a copy of the thread that is under way, and not for a map.
        """
        # This goes before the look at `_writes`: the thread writes that, then looks here.
        self._generation = NONE
        self._worker.submit(partial(setattr, self, "_staged", None))
        self._worker.close()
        while self._writes and self._worker.lives:
            time.sleep(_GLANCE_S)

    def _serve_held(self, peers: Any) -> None:
        """Serve the version that all ranks hold. Collective.

        Raises EPStateError if they hold different ones.
        """
        mine = self._ep.versions.of(self._layers.values())
        # JSON has made lists of the records.
        of_ranks: list[Held | None] = []
        for held in peers.all_gather(mine):
            of_ranks.append(None if held is None else Held(*held))
        differ = differences(of_ranks)
        if differ:
            remedy = (
                "let the trainer send a version and make the receiver again; or load the same "
                "weights on all ranks, and say so by `version=`"
            )
            raise EPStateError(f"ranks serve different weights, {differ}: {remedy}")
        assert mine is not None, "it has been compared"
        self._target = mine.version
        self.version = mine.version

    def _mark_received(self) -> None:
        """Record that all ranks have one version in these layers."""
        self._ep.versions.mark_received(self._layers.values())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Copy within this context into memory that does not serve. Raises EPStateError if this
        object is closed.
        """
        # This goes before the look at the generation: `close` writes that, then looks here.
        self._writes = True
        try:
            self._check_open()
            with self._copies.running():
                yield
        finally:
            self._writes = False

    def _has_other_layers(self, layers: Iterable[nn.Module]) -> bool:
        mine = map(id, self._layers.values())
        return {*map(id, layers)}.isdisjoint(mine)

    def _has_nothing_to_do(self) -> bool:
        """Whether no flip and no version is to come, by a glance of 1 µs at the words of rank 0."""
        target, flip_round = self._words.glance
        serves_target = target <= self._target == self.version
        if not serves_target or flip_round > self._flipped_behind:
            return False
        # Rank 0 looks into the folder from time to time.
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

    def _stage_and_report(self, number: int) -> None:
        """Stage a version, on the thread. A failure is reported here; a staged version by the next
        tick.
        """
        # A tick that was interrupted submits the same version a second time.
        if number != self._begun:
            self._begun = number
            self._staged = None
            try:
                self._staged = self._stage(number)
                self.problem = None
            except BaseException as error:
                self.problem = error
                if self._is_open:
                    self._log_problem(number)
        has_flipped = number <= self.version
        if self._staged is None and not has_flipped:
            self._words.report(number, is_staged=False)
            # Frames of the error have what was mapped, and copies of it may still run.
            if self.problem is not None:
                traceback.clear_frames(self.problem.__traceback__)

    def _learn_of_failure(self, words: Words) -> None:
        """Note in `problem` which other rank could not take a version."""
        failed = words.ranks_that_failed(words.target)
        if failed:
            what = f"rank {failed[0]} has not taken version {words.target}: its `problem` says why"
            self.problem = EPStateError(what)

    def _log_problem(self, number: int) -> None:
        _log.warning("version %d of the weights is not taken: %s", number, self.problem)

    def _decide(self, words: Words, round_number: int) -> None:
        """On rank 0: let all ranks flip, or ask for another version."""
        target = words.target
        serves = target <= self.version
        all_have_it = outcome(words.reports, target)
        if not serves and all_have_it:
            self._words.flip_behind(round_number)
        elif serves or all_have_it is False:
            self._ask_for_newer(target)

    def _ask_for_newer(self, target: int) -> None:
        """On rank 0: look into the folder, but not in every tick."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        newest = newest_version(self._folder)
        if newest > max(target, self.version):
            self._words.ask_for(newest)

    @takes_turn_of_exchange
    def _take_newest(self, peers: Any, least: int, timeout_s: float) -> bool:
        """Take the newest version that all ranks find. Collective.

        Returns whether it is `least` or a newer one, and has come in time.
        """
        self._check_state()
        deadline = time.monotonic() + timeout_s
        failed = NONE
        while True:
            # Rank 0's folder and clock decide, so that all ranks go the same way.
            mine = _Sight(newest_version(self._folder), self.version, time.monotonic() > deadline)
            sights = [_Sight(*each) for each in peers.all_gather(mine)]
            newest = sights[0].newest
            # A flip may have failed on some ranks, which serve an older version.
            served = min(sight.version for sight in sights)
            if newest > max(served, least - 1, failed):
                if self._take_together(peers, newest):
                    return True
                failed = newest
            elif served >= least:
                return True
            elif sights[0].is_late:
                return False
            else:
                time.sleep(_LOOK_S)

    def _take_together(self, peers: Any, number: int) -> bool:
        """Stage a version and flip to it, on all ranks or on none. Collective.

        Returns whether all ranks could stage it.
        """
        # The thread writes to the memory into which this version goes.
        self._await_worker()
        # Rank 0 takes back a flip that is to come, for all ranks, even if one raises.
        if self._ep.rank == 0:
            self._words.flip_behind(NONE)
        peers.all_gather(None)
        # If this is interrupted, ticks stage the target again, or report what is staged.
        self._target = self.version
        self._words.take_report_back()
        self._staged = None
        self._begun = NONE
        # Stage. A version that has gone is no error: its trainer has ended or sent a newer one.
        staged = None
        not_finite = ""
        try:
            staged = self._stage(number)
        except FileNotFoundError:
            pass
        except NotFiniteError as error:
            not_finite = str(error)
        # Flip, if all ranks have staged it.
        reasons = []
        reports = []
        for has_it, reason in peers.all_gather((staged is not None, not_finite)):
            reports.append(Report(number, has_it))
            if reason:
                reasons.append(reason)
        self.problem = NotFiniteError(reasons[0]) if reasons else None
        if staged is not None and outcome(reports, number):
            self._flip(staged)
            self._target = number
            return True
        if self.problem is not None:
            self._log_problem(number)
        return False

    def _stage(self, number: int) -> Version:
        """Map a version, and copy it into the spare memory, if there is any.

        Raises ValueError if it does not fit, and NotFiniteError.
        """
        weights = self._weights()
        with self._copies.running():
            version = map_version(self._folder, number, self._copies.memory)
            self._check_fits(version, weights)
            if self._check_finite:
                self._check_values(version, weights)
        spare = self._spare
        if spare is not None:
            with self._writing():
                # Either set may serve: copy into the other one.
                free = {}
                for name, serving in weights.items():
                    free[name] = self._copies.free(self._own[name], spare[name], serving)
                self._free = free
                self._copy(version, free)
        return version

    def _check_fits(self, version: Version, weights: Mapping[str, Tensors]) -> None:
        """Raise ValueError if the version has other layers, experts or dense weights."""
        odd = sorted(weights.keys() ^ version.experts.keys())
        if odd:
            raise ValueError(
                f"`model` and version {version.number} must have the same layers: one has no "
                f"{odd[0]!r}"
            )
        for name in weights:
            check_all_experts(version, name, self._ep.config.model.num_experts)
            _check_layer(version, name, self._layers[name].experts, weights[name])
        if version.dense and self._dense is None:
            raise ValueError(
                f"version {version.number} has dense weights, such as "
                f"{next(iter(version.dense))!r}: `dense` must take them"
            )

    def _flip(self, version: Version) -> None:
        """Let a version serve, between two rounds. After an exception, all of it is done again."""
        self._await_device()
        start = time.perf_counter()
        layers = self._layers.values()
        # The layers have no version until all of this one is there.
        self._ep.versions.put(layers, None)
        # Experts: from the trainer where there is no spare memory, or by the other set.
        with self._copies.running():
            if self._free is None:
                self._copy(version, self._weights())
            else:
                for name, weights in self._weights().items():
                    self._copies.use(self._free[name], weights)
        # The other weights: the callback may keep the tensors.
        if self._dense is not None:
            named = {self._names.get(name, name): value for name, value in version.dense.items()}
            taken = self._dense(self._copies.owned(named))
            _check_taken(named, taken)
        self._await_device()
        self._ep.versions.put(layers, Held(version.number, version.trainer))
        self.version = version.number
        self.pause_s = time.perf_counter() - start

    @torch.inference_mode()
    def _copy(self, version: Version, to: Mapping[str, Tensors]) -> None:
        """Write this rank's experts of a version into the tensors `to`, by layer."""
        for layer in self._layers:
            # `close` ends a copy into spare memory, and no flip.
            if self._writes:
                self._check_open()
            for rows in self._rows(version, layer):
                begin = rows.begin
                target = to[layer][rows.weight][begin : begin + len(rows.values)]
                if target.dtype != FP8:
                    target.copy_(rows.values)
                    continue
                # Quantize one expert after another, which takes little memory.
                scales = to[layer][_SCALES[rows.weight]]
                for i, quantized in enumerate(map(quantize_weights, rows.values)):
                    target[i].copy_(quantized.q)
                    scales[begin + i].copy_(quantized.scales)

    def _rows(self, version: Version, layer: str) -> Iterator[_Rows]:
        """The rows that a version has for this rank's experts of a layer."""
        places: dict[int, _Place] = {}
        for part in version.experts[layer]:
            for row, expert in enumerate(part.held):
                places[expert] = _Place(part.weights, row)
        for run in _runs([places[expert] for expert in self._held_experts(layer)]):
            for weight, values in run.weights.items():
                yield _Rows(weight, run.begin, values[run.first : run.first + run.num_rows])

    @torch.inference_mode()
    def _check_values(self, version: Version, to: Mapping[str, Tensors]) -> None:
        """Raise NotFiniteError if a value is not finite in the dtype that it has here. The error
        says where the first one is.
        """
        for layer in self._layers:
            held = self._held_experts(layer)
            for rows in self._rows(version, layer):
                dtype = to[layer][rows.weight].dtype
                # The scales of fp8 take any finite values.
                if dtype == FP8:
                    dtype = rows.values.dtype
                odd = nonfinite_rows(rows.values, dtype)
                if odd:
                    expert = held[rows.begin + odd[0]]
                    where = f"`{rows.weight}` of expert {expert} of {layer!r}"
                    _raise_not_finite(version, dtype, where)
        for name, value in version.dense.items():
            if nonfinite_rows(value[None], value.dtype):
                _raise_not_finite(version, value.dtype, f"`dense[{name!r}]`")

    def _await_worker(self) -> None:
        """Wait until the thread has done what it was given. Raises TimeoutError."""
        idle = self._worker.submit(lambda: None)
        # Half of the deadline of a collective: other ranks hear of it in time.
        deadline = time.monotonic() + self._ep.config.exchange.warmup_timeout_s / 2
        while not idle.done:
            if time.monotonic() > deadline:
                raise TimeoutError("an earlier version of the weights is still on its way")
            time.sleep(_GLANCE_S)

    def _await_device(self) -> None:
        self.exchange.wait_for_device(self.exchange.deadlines.wait_s())

    def _weights(self) -> dict[str, Tensors]:
        return {name: _weights_of(layer.experts) for name, layer in self._layers.items()}

    def _held_experts(self, layer: str) -> list[int]:
        """The logical expert of each row of this rank in a layer."""
        return self._ep.logical_experts(self._layers[layer].tag)


_open = WeakSet[WeightReceiver]()


def _names_of_state(model: nn.Module) -> dict[str, str]:
    """The names in a model's state dict, by the same names without wrappers of torch. Names that
    differ in wrappers only are left out.
    """
    names = list(model.state_dict(keep_vars=True))
    counts = Counter(map(name_without_wrappers, names))
    names_by_plain = {}
    for name in names:
        plain = name_without_wrappers(name)
        if counts[plain] == 1:
            names_by_plain[plain] = name
    return names_by_plain


def _check_taken(dense: Mapping[str, Tensor], taken: object) -> None:
    """Raise ValueError if the callback has taken no weight. `taken` is what it has returned, such
    as the result of `load_state_dict`.
    """
    unexpected = getattr(taken, "unexpected_keys", ())
    if dense and dense.keys() <= {*unexpected}:
        raise ValueError(
            f"`dense` has taken no weight, since the model has no such names: {sorted(dense)[:3]}"
        )


def _raise_not_finite(version: Version, dtype: torch.dtype, where: str) -> NoReturn:
    what = f"version {version.number} has values that are not finite in {dtype_name(dtype)}"
    raise NotFiniteError(f"{what}: {where}")


def _weights_of(experts: Any) -> Tensors:
    """This rank's rows of the parameters, whose memory a flip changes. Raises ValueError for
    experts in other formats than fp32, fp16, bf16 and fp8.
    """
    is_other_format = experts.is_quantized and not experts.is_fp8
    if is_other_format or experts.dtype not in FLOATS:
        raise ValueError(
            "`model` must have experts in fp32, fp16, bf16 or fp8 to receive weights, got "
            f"{experts}"
        )
    with torch.no_grad():
        return {name: local_view(value) for name, value in experts.named_parameters()}


def _like(weights: Tensors) -> Tensors:
    """Allocate a second set of tensors, of inference mode if these are."""
    with torch.inference_mode(next(iter(weights.values())).is_inference()):
        return {name: torch.empty_like(weight) for name, weight in weights.items()}


def _runs(places: list[_Place]) -> Iterator[_Run]:
    """Cut the rows of a rank into runs. `places` has the place of each row in the version."""
    begin = 0
    for end in range(1, len(places) + 1):
        first = places[begin]
        if end < len(places):
            # The run goes on if the next row follows in the same tensors.
            following = places[end]
            row_in_run = first.row + end - begin
            if following.weights is first.weights and following.row == row_in_run:
                continue
        yield _Run(begin, end - begin, first.weights, first.row)
        begin = end


def _check_layer(version: Version, name: str, experts: Any, weights: Tensors) -> None:
    """Raise ValueError if experts of a layer have other shapes, or compute something else."""
    wanted = _shapes_of_experts(weights)
    for part in version.experts[name]:
        got = _shapes_of_experts(part.weights)
        if got != wanted or part.computes != computes(experts):
            raise ValueError(
                f"experts of {name!r} must have {wanted} that compute {computes(experts)}, got "
                f"{got} that compute {part.computes}"
            )


def _shapes_of_experts(weights: Tensors) -> dict[str, tuple[int, ...]]:
    """The shapes of an expert's weights by name, without those of fp8 scales."""
    scales = _SCALES.values()
    return {name: tuple(value.shape[1:]) for name, value in weights.items() if name not in scales}
