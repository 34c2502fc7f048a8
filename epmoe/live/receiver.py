"""`WeightReceiver`: a server takes versions of its weights from a trainer of other ranks, between
two rounds.

Ranks settle the change by words in shared memory (flip_words.py):

    rank 0   finds a new version in the folder, and writes its number: TARGET
    rank r   maps and copies this version while rounds go on, and then reports it: STAGED
    rank 0   sees that all ranks have staged it, and writes the number n of its last round: ROUND
    rank r   flips in the first tick after it has opened round n + 2

**Why all ranks flip between the same rounds.** Rank 0 writes ROUND = n between its rounds n and
n + 1. Each rank that has opened round n + 2 sees this word, for one of two reasons. Either the rank
has got tokens of rank 0 in round n + 1. Or it has given round n + 1 up, and then it has waited,
before round n + 2, until rank 0 had ended round n + 1. A rank that has not opened round n + 2 does
not flip yet.

**Why there is no second word for the version.** A rank could see the new version beside the round
of the flip before. So ROUND alone says that there is a flip. ROUND grows with each flip, and a rank
takes each value once. Until a rank has flipped, it takes no newer TARGET: if rank 0 gives rounds
up, it may write the next TARGET one tick before this rank flips. In `load`, rank 0 takes a ROUND
back if the flip has not happened yet.

**On GPUs** hosts run ahead of rounds, and replays of CUDA graphs are counted on the device alone.
So a rank that has staged a version waits at each tick for its own GPU, and takes the count of
rounds from the GPU. Only then does the rank report STAGED. By that time rank 0 has launched all
rounds that this rank has launched, so the ROUND that rank 0 writes names a later one. The rank
goes on to wait at each tick until it flips, so what is said above holds on GPUs, too.
Copies of weights run on a stream of their own. CUDA graphs have the addresses of the weights, so a
flip copies into these addresses while no round runs. On CPUs the same steps run, and find nothing
to wait for.
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
# Seconds between two looks into the folder: listing it costs more than a tick may.
_LOOK_S = 0.005
# Seconds between two looks at the thread while this rank waits for it.
_GLANCE_S = 1e-4
# Names of the scales, by the fp8 weights that have them.
_SCALES = {"w_gate_up": "gate_up_scales", "w_down": "down_scales"}


class _Sight(NamedTuple):
    """What one rank sees of the folder and of itself, and tells the other ranks."""

    newest: int
    """the newest version in the folder of which every part has come, or −1"""
    version: int
    """the version that serves on the rank"""
    is_late: bool
    """whether the timeout of the call is over"""


class _Run(NamedTuple):
    """Experts whose rows follow one another both in this rank's weights and in a version's.

    One copy can bring all rows of a run.
    """

    begin: int
    """the first row of the run in this rank's weights"""
    num_rows: int
    weights: Tensors
    """the tensors of the version in which the run lies"""
    version_begin: int
    """the first row of the run in `weights`"""


class _Place(NamedTuple):
    """Where a version has the weights of one expert: the tensors, and the row in each of them."""

    weights: Tensors
    row: int


class _Rows(NamedTuple):
    """The part of a version that goes into consecutive rows of one weight of this rank."""

    weight: str
    """the name of the weight, such as `w_down`"""
    begin: int
    """the first row in this rank's weight"""
    values: Tensor
    """[rows, …], in memory of the version"""


class Serving(Member, Protocol):
    """The part of an `ExpertParallel` that a `WeightReceiver` uses."""

    device: torch.device
    live: Any
    versions: HeldVersions

    def logical_experts(self, tag: int = 0) -> list[int]: ...


class WeightReceiver:
    """Takes the versions of weights that a trainer's `WeightSender`s leave in a folder. All ranks
    of the server make a receiver, and call its `tick` after each forward pass.

    The trainer may have any number of ranks and any placement. Its experts are fp32, fp16 or bf16.
    They become what the experts of this model are: the same dtype, or fp8 in blocks. All ranks
    change to a version between the same two rounds. If something fails before that, such as a
    trainer that dies, the present version goes on to serve.

    The constructor is collective. It loads the newest version, if there is one, before it returns.
    Make a new receiver after `resume`, `recover` and `resize`.

    Args:
        ep: the `ExpertParallel` of the model, without `placement.live`.
        model: its `MoELayer`s must have the names of the trainer's.
        folder: the folder of the trainer's `WeightSender`s.
        spare: whether each rank has memory for a second set of its experts. A thread then fills
            the second set while rounds go on. On CPUs a flip swaps the two sets. On GPUs a flip
            copies within the memory of the GPU, because weights must keep the addresses that CUDA
            graphs have. With False, a flip copies the weights from the trainer, and rounds wait
            for this longer copy.
        dense: a callback that takes the weights of a version that are no experts, by name. All
            ranks call it at the flip. It must be given if the trainer sends such weights.
            A weight has its name in `model.state_dict()`, if that has the name with or without
            the wrappers of torch; otherwise the sender's name without wrappers. If the callback
            returns what `load_state_dict(…, strict=False)` returns, it must have taken at least one
            weight. If the callback, a copy or a signal handler raises in a flip, `tick` raises,
            too. This rank then has weights of two versions: call `tick` again before the next
            round, which does the flip again, or end the rank.
        check_finite: whether a version is passed over if it has NaN or Inf in `dense` or in
            experts, in the dtype that these have on this rank. `problem` then says where. The check
            reads the version once more.
        version: the number of the weights that the host has loaded itself, the same on all ranks.
            None: the weights are those that former receivers have brought, which `ep` knows.

    Attributes:
        version: the number of the version that serves; −1 for weights that no receiver has brought.
        pause_s: how long the last flip took, in seconds. It includes the callback, and on GPUs the
            time until the GPU has done the copies.
        problem: why the last version was not taken, or None. The next version may be taken. If the
            reason lies on one rank, `problem` of the other ranks names this rank.

    Raises:
        ValueError: `ep` has experts that move, the model has other experts than the version, or the
            version does not fit otherwise. All ranks raise it.
        PermissionError: another user owns the folder, or can write into it.
        EPStateError: ranks hold different versions, and the folder has no whole version that they
            could all take. This happens after a death in the middle of a flip, with a rank that has
            joined, or if `recover` has loaded lost experts. The error says who holds what.
        EPTimeoutError: ranks ended or did not come within `exchange.warmup_timeout_s`. The error
            names them.
    """

    # Whether the thread copies into the spare memory now; `close` waits for that.
    _writes = False

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
        # The last version that this rank has begun to take: the last TARGET that it has seen.
        self._target = NONE
        # The last ROUND after which this rank has flipped.
        self._flipped_behind = NONE
        # The last version that the thread has begun to stage.
        self._begun = NONE
        # The version that the thread has staged; None again after the flip.
        self._staged: Version | None = None
        # When rank 0 has looked into the folder last, in seconds of `time.monotonic`.
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
            # The host says which weights it has loaded itself.
            if version is not None:
                ep.versions.put(self._layers.values(), Held(version, trainer=""))
            # Begin with the newest version. If there is none, go on with the weights that are
            # there, which must be the same version on all ranks.
            if not self._take_newest(peers, least=0, timeout_s=0.0):
                self._serve_held(peers)

    def _take_memory(self, needs_spare: bool) -> None:
        """Note where the experts' weights lie, and allocate memory for a second set on request."""
        self._copies = processor_of(self._ep.device).weight_copies()
        weights = self._weights()
        # The memory in which the weights lie now. `data` leaves the parameter free to change.
        self._first_set: dict[str, Tensors] = {}
        for layer, tensors in weights.items():
            self._first_set[layer] = {name: weight.data for name, weight in tensors.items()}
        self._spare: dict[str, Tensors] | None = None
        if needs_spare:
            self._spare = {layer: _like(tensors) for layer, tensors in weights.items()}
        # The set that does not serve, into which the next version is staged. Only `_stage` changes
        # this attribute, so a flip that is done a second time uses the same set.
        self._free = self._spare
        # torch may have given out memory that kernels on other streams still use.
        self._await_device()

    def _replace_former(self) -> None:
        """Close other receivers of these layers: their threads could write into memory that is
        about to serve.
        """
        for former in list(_open):
            if not former._has_other_layers(self._layers.values()):
                former.close()
        _open.add(self)

    def load(self, version: int, timeout_s: float = 60.0) -> None:
        """Wait for a version, and take this version or a newer one before the call returns.
        Collective: all ranks call it between the same two rounds.

        It is for loops in which a rollout must have the weights of the last step. It also raises
        what `tick` and the constructor raise: call it again then.

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
        """Take one step towards the next version. All ranks call it between the same two rounds,
        after each forward pass.

        It never waits for another rank. On GPUs it waits for the rounds that this rank has
        launched, but only from the time when this rank has a version until all ranks have it.

        Returns:
            Whether this call has flipped to a new version. The calls of all ranks between these
            two rounds return the same.

        Raises EPStateError if a round is open or the group has changed, and whatever `dense`
        raises.
        """
        self._check_state()
        if self._has_nothing_to_do():
            return False
        round_number = self.exchange.rounds.count
        words = self._words.read()
        # Report a staged version, but only after the GPU has run all rounds so far: from this
        # report on, rank 0 may let all ranks flip.
        staged = self._staged
        if staged is not None and self._may_report(staged.number, words):
            self._await_device()
            round_number = self.exchange.health(wait=False).rounds
            self._words.report(staged.number, is_staged=True)
            words = self._words.read()
        # Flip once this rank has opened round ROUND + 2. The head of this file says why.
        flips = self._flipped_behind < words.flip_round < round_number - 1
        if flips:
            assert self._staged is not None, "ROUND comes once all ranks have staged"
            self._flip(self._staged)
            # One statement for both: if a signal handler raised between two statements, the next
            # tick would flip again, with no staged version.
            self._staged, self._flipped_behind = None, words.flip_round
        # While a flip is still to come, this rank looks at no newer version.
        is_flip_to_come = words.flip_round > self._flipped_behind
        if not is_flip_to_come:
            self._go_to_target(words)
            if self._ep.rank == 0:
                self._decide(words, round_number)
        return flips

    def _may_report(self, number: int, words: Words) -> bool:
        """Whether to report a staged version to the other ranks.

        It must be the version that rank 0 asks for. It must not serve already, and no rank may have
        failed to stage it.
        """
        is_wanted = self.version < number == self._target
        return is_wanted and not words.ranks_that_failed(number)

    def _go_to_target(self, words: Words) -> None:
        """Begin to stage the version that rank 0 asks for. If staging began earlier, look whether
        another rank has failed to stage it.
        """
        if words.target > self._target:
            self._worker.submit(partial(self._stage_and_report, words.target))
            # This comes last: if `submit` raises, the next tick calls it again.
            self._target = words.target
        elif words.target > self.version and self.problem is None:
            self._learn_of_failure(words)

    def close(self) -> None:
        """End the thread, and release the mapped versions. The weights that serve stay.

        If the thread is copying, `close` waits for the copy. If the thread is mapping a version,
        `close` does not wait.
        """
        # Set the generation first, then read `_writes`. The thread goes the other way: it sets
        # `_writes`, then reads the generation. So at least one of the two sees the other.
        self._generation = NONE
        # The thread forgets its staged version after whatever it is doing now.
        self._worker.submit(partial(setattr, self, "_staged", None))
        self._worker.close()
        while self._writes and self._worker.lives:
            time.sleep(_GLANCE_S)

    def _serve_held(self, peers: Any) -> None:
        """Go on with the weights that the ranks have, as no version was in the folder. Collective.

        Raises EPStateError if ranks hold different versions.
        """
        mine = self._ep.versions.of(self._layers.values())
        # `all_gather` sends values as JSON, in which a `Held` arrives as a list of its fields.
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
        assert mine is not None, "`differences` reports a rank that holds no version"
        self._target = mine.version
        self.version = mine.version

    def _mark_received(self) -> None:
        """Record in `ep` that all ranks have the same version in the layers of this receiver, so
        that rounds may begin.
        """
        self._ep.versions.mark_received(self._layers.values())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A context in which the thread may copy into memory that does not serve.

        Raises EPStateError if this object is closed.
        """
        # Set `_writes` first, then read the generation. `close` goes the other way: it sets the
        # generation, then reads `_writes`. So at least one of the two sees the other.
        self._writes = True
        try:
            self._check_open()
            with self._copies.running():
                yield
        finally:
            self._writes = False

    def _has_other_layers(self, layers: Iterable[nn.Module]) -> bool:
        """Whether this receiver has none of these layers."""
        own_ids = {id(layer) for layer in self._layers.values()}
        return own_ids.isdisjoint(id(layer) for layer in layers)

    def _has_nothing_to_do(self) -> bool:
        """Whether neither a flip nor a new version is to come.

        `tick` asks this at every step, so it only reads the two words of rank 0, in about 1 µs.
        """
        target, flip_round = self._words.glance
        serves_target = target <= self._target == self.version
        if not serves_target or flip_round > self._flipped_behind:
            return False
        # Rank 0 also has to look into the folder, every `_LOOK_S` seconds.
        is_look_due = time.monotonic() - self._looked >= _LOOK_S
        return self._ep.rank > 0 or not is_look_due

    def _check_state(self) -> None:
        """Raise EPStateError if this object is closed, the group has changed or a round is open."""
        rounds = self.exchange.rounds
        self._check_open()
        if rounds.state != CLOSED:
            raise EPStateError(f"round {rounds.count} is open: weights change between rounds")

    @property
    def _is_open(self) -> bool:
        """Whether this object is not closed, and the group is still that of its constructor."""
        return self._ep.generation == self._generation

    def _check_open(self) -> None:
        """Raise EPStateError if this object is closed or the group has changed."""
        if not self._is_open:
            raise EPStateError(
                "it is closed, or the group has changed: make a new WeightReceiver on all ranks"
            )

    def _stage_and_report(self, number: int) -> None:
        """Stage a version. The thread runs this.

        A failure is reported here, at once. A version that was staged is reported by the next
        `tick`, since on GPUs that waits for the rounds so far.
        """
        # A tick that a signal handler has interrupted submits the same version a second time.
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
        # `load` may have flipped to this version or to a newer one meanwhile.
        has_flipped = number <= self.version
        if self._staged is None and not has_flipped:
            self._words.report(number, is_staged=False)
            # The frames of the traceback keep the mapped version alive. Clear them, so that its
            # memory is released.
            if self.problem is not None:
                traceback.clear_frames(self.problem.__traceback__)

    def _learn_of_failure(self, words: Words) -> None:
        """If another rank could not stage the version, note in `problem` which rank that is."""
        failed = words.ranks_that_failed(words.target)
        if failed:
            what = f"rank {failed[0]} has not taken version {words.target}: its `problem` says why"
            self.problem = EPStateError(what)

    def _log_problem(self, number: int) -> None:
        """Warn that version `number` is passed over, and why."""
        _log.warning("version %d of the weights is not taken: %s", number, self.problem)

    def _decide(self, words: Words, round_number: int) -> None:
        """On rank 0: let all ranks flip, or ask for another version.

        There are three cases. All ranks have staged the version: they may flip. It serves already,
        or a rank could not stage it: look for a newer version. Otherwise some rank is still staging
        it, and there is nothing to do.
        """
        target = words.target
        serves = target <= self.version
        is_staged_by_all = outcome(words.reports, target)
        if not serves and is_staged_by_all:
            self._words.flip_behind(round_number)
        elif serves or is_staged_by_all is False:
            self._ask_for_newer(target)

    def _ask_for_newer(self, target: int) -> None:
        """On rank 0: ask all ranks to stage the newest version of the folder, if that is newer.

        Listing the folder takes long for a tick, so rank 0 does it every `_LOOK_S` seconds.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        newest = newest_version(self._folder)
        if newest > max(target, self.version):
            self._words.ask_for(newest)

    @takes_turn_of_exchange
    def _take_newest(self, peers: Any, least: int, timeout_s: float) -> bool:
        """Take the newest version that all ranks find, and wait for version `least`. Collective.

        Returns whether all ranks serve version `least` or a newer one. False: `timeout_s` seconds
        have passed before it came.
        """
        self._check_state()
        deadline = time.monotonic() + timeout_s
        # The newest version that could not be staged: the next attempt needs a newer one.
        failed = NONE
        while True:
            # Ranks may see different folders and clocks. Those of rank 0 decide, so that all ranks
            # take the same branch below.
            own_sight = _Sight(
                newest=newest_version(self._folder),
                version=self.version,
                is_late=time.monotonic() > deadline,
            )
            # `all_gather` sends values as JSON, in which a record arrives as a list of its fields.
            sights = [_Sight(*fields) for fields in peers.all_gather(own_sight)]
            newest = sights[0].newest
            # If a flip has failed on some ranks, these still serve an older version.
            served_by_all = min(sight.version for sight in sights)
            if newest > max(served_by_all, least - 1, failed):
                if self._take_together(peers, newest):
                    return True
                failed = newest
            elif served_by_all >= least:
                return True
            elif sights[0].is_late:
                return False
            else:
                time.sleep(_LOOK_S)

    def _take_together(self, peers: Any, number: int) -> bool:
        """Stage a version and flip to it, on all ranks or on none. Collective.

        Returns whether all ranks could stage it. If a value is not finite, `problem` says where.
        """
        # The thread may be writing an older version into the memory that is needed here.
        self._await_worker()
        # Rank 0 takes back a flip that ticks have agreed on. All ranks wait until this is done,
        # also if one of them raises in a moment.
        if self._ep.rank == 0:
            self._words.flip_behind(NONE)
        peers.all_gather(None)
        # Forget what ticks have staged. If a signal handler raises from here on, the next ticks
        # see the TARGET anew and stage it again.
        self._target = self.version
        self._words.take_report_back()
        self._staged = None
        self._begun = NONE
        # Stage the version. If it has gone, that is no error: the trainer has ended, or has sent
        # a newer version and removed this one.
        staged = None
        not_finite = ""
        try:
            staged = self._stage(number)
        except FileNotFoundError:
            pass
        except NotFiniteError as error:
            not_finite = str(error)
        # Tell one another what came of that.
        reasons = []
        reports = []
        for is_staged, reason in peers.all_gather((staged is not None, not_finite)):
            reports.append(Report(number, is_staged))
            if reason:
                reasons.append(reason)
        # All ranks name the same reason. Flip if there is none.
        self.problem = NotFiniteError(reasons[0]) if reasons else None
        if staged is not None and outcome(reports, number):
            self._flip(staged)
            self._target = number
            return True
        if self.problem is not None:
            self._log_problem(number)
        return False

    def _stage(self, number: int) -> Version:
        """Map a version, check it, and copy it into the spare memory if there is any.

        Raises FileNotFoundError if the version has gone, ValueError if it does not fit this model,
        and NotFiniteError if it has a NaN or Inf.
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
                # Each flip swaps the two sets, so copy into the set that does not serve now.
                free = {}
                for name, serving in weights.items():
                    free[name] = self._copies.free(self._first_set[name], spare[name], serving)
                self._free = free
                self._copy(version, free)
        return version

    def _check_fits(self, version: Version, weights: Mapping[str, Tensors]) -> None:
        """Raise ValueError if the version does not fit the model: it has other layers, lacks
        experts, has experts of other shapes, or has dense weights that nobody takes.
        """
        only_on_one_side = sorted(weights.keys() ^ version.experts.keys())
        if only_on_one_side:
            raise ValueError(
                f"`model` and version {version.number} must have the same layers: one has no "
                f"{only_on_one_side[0]!r}"
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
        """Let a staged version serve from now on. `tick` and `load` call it between two rounds.

        If it raises, the next call of `tick` does all of it again. It sets `version` and `pause_s`.
        """
        # Rounds that still run read the present weights.
        self._await_device()
        start = time.perf_counter()
        layers = self._layers.values()
        # While weights of two versions are mixed, the layers count as having none.
        self._ep.versions.put(layers, None)
        # The experts: without spare memory, copy them from the trainer. With it, let the set
        # serve that `_stage` has filled.
        with self._copies.running():
            if self._free is None:
                self._copy(version, self._weights())
            else:
                for name, weights in self._weights().items():
                    self._copies.use(self._free[name], weights)
        # The dense weights: the callback may keep the tensors that it gets, so it gets `owned`
        # ones, which do not lie in the memory of the version.
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
        """Copy the experts that this rank holds from a version into `to`, which has the weights of
        each layer by their names. Weights for fp8 experts are quantized on the way.
        """
        for layer in self._layers:
            # `close` may end a copy of the thread into spare memory. A flip must come to its end.
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
        """The weights of a version for the experts that this rank holds in a layer.

        The trainer may have placed its experts otherwise. So each `_Rows` covers experts that
        follow one another on both sides, as many as there are.
        """
        # Where the version has each expert. Several ranks of the trainer may have sent it.
        places: dict[int, _Place] = {}
        for part in version.experts[layer]:
            for row, expert in enumerate(part.held):
                places[expert] = _Place(part.weights, row)
        for run in _runs([places[expert] for expert in self._held_experts(layer)]):
            for weight, values in run.weights.items():
                yield _Rows(
                    weight, run.begin, values[run.version_begin : run.version_begin + run.num_rows]
                )

    @torch.inference_mode()
    def _check_values(self, version: Version, to: Mapping[str, Tensors]) -> None:
        """Raise NotFiniteError if a value of the version is not finite in the dtype that it gets on
        this rank. The error says where the first such value is.
        """
        for layer in self._layers:
            held = self._held_experts(layer)
            for rows in self._rows(version, layer):
                dtype = to[layer][rows.weight].dtype
                # Any finite value can become fp8, since its scale takes up the size. So there the
                # value only has to be finite as it was sent.
                if dtype == FP8:
                    dtype = rows.values.dtype
                bad_rows = nonfinite_rows(rows.values, dtype)
                if bad_rows:
                    expert = held[rows.begin + bad_rows[0]]
                    where = f"`{rows.weight}` of expert {expert} of {layer!r}"
                    _raise_not_finite(version, dtype, where)
        # A dense weight keeps its dtype. It counts as one row.
        for name, value in version.dense.items():
            if nonfinite_rows(value[None], value.dtype):
                _raise_not_finite(version, value.dtype, f"`dense[{name!r}]`")

    def _await_worker(self) -> None:
        """Wait until the thread has done all that was submitted to it.

        Raises TimeoutError if that takes too long.
        """
        # The thread works in order: once it has done this empty task, it has done all others.
        idle = self._worker.submit(lambda: None)
        # Wait for half of the time that other ranks wait in a collective: so they get this rank's
        # TimeoutError before their own deadline is over.
        deadline = time.monotonic() + self._ep.config.exchange.warmup_timeout_s / 2
        while not idle.done:
            if time.monotonic() > deadline:
                raise TimeoutError("an earlier version of the weights is still on its way")
            time.sleep(_GLANCE_S)

    def _await_device(self) -> None:
        """Wait until the GPU has done what was launched on it. On CPUs there is nothing to do."""
        self.exchange.wait_for_device(self.exchange.deadlines.wait_s())

    def _weights(self) -> dict[str, Tensors]:
        """The weights of this rank's experts that serve now, by layer and by name."""
        return {name: _weights_of(layer.experts) for name, layer in self._layers.items()}

    def _held_experts(self, layer: str) -> list[int]:
        """The logical expert of each row of this rank in a layer."""
        return self._ep.logical_experts(self._layers[layer].tag)


# The receivers of this process that still live, for `_replace_former`.
_open = WeakSet[WeightReceiver]()


def _names_of_state(model: nn.Module) -> dict[str, str]:
    """The names in a model's state dict. The keys are the same names without the parts that
    wrappers of torch put in.

    If two names differ in these parts only, both are left out: neither could be told from the
    other.
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
    """Raise ValueError if the callback `dense` has taken none of the weights.

    `taken` is what the callback has returned. Only a result of `load_state_dict` says which names
    it did not know, in `unexpected_keys`. Of anything else nothing can be said.
    """
    unexpected = getattr(taken, "unexpected_keys", ())
    if dense and dense.keys() <= {*unexpected}:
        raise ValueError(
            f"`dense` has taken no weight, since the model has no such names: {sorted(dense)[:3]}"
        )


def _raise_not_finite(version: Version, dtype: torch.dtype, where: str) -> NoReturn:
    """Raise NotFiniteError, which says `where` the version has a NaN or Inf in this dtype."""
    what = f"version {version.number} has values that are not finite in {dtype_name(dtype)}"
    raise NotFiniteError(f"{what}: {where}")


def _weights_of(experts: Any) -> Tensors:
    """The parameters of a layer's experts by name, as far as they lie on this rank: the memory
    that a flip writes.

    Raises ValueError for experts in other formats than fp32, fp16, bf16 and fp8.
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
    """Allocate a second set of tensors. They belong to torch's inference mode if the first set
    does, since both take the same place in turn.
    """
    with torch.inference_mode(next(iter(weights.values())).is_inference()):
        return {name: torch.empty_like(weight) for name, weight in weights.items()}


def _runs(places: list[_Place]) -> Iterator[_Run]:
    """Cut the rows of a rank into runs, each as long as possible.

    `places` says for each row of this rank where the version has the same expert.
    """
    begin = 0
    for end in range(1, len(places) + 1):
        first = places[begin]
        if end < len(places):
            # The run is longer if row `end` follows in the same tensors of the version, too.
            following = places[end]
            row_in_run = first.row + end - begin
            if following.weights is first.weights and following.row == row_in_run:
                continue
        yield _Run(
            begin=begin,
            num_rows=end - begin,
            weights=first.weights,
            version_begin=first.row,
        )
        begin = end


def _check_layer(version: Version, name: str, experts: Any, weights: Tensors) -> None:
    """Raise ValueError if a version's experts of a layer have other shapes than this model's, or
    compute with another activation.
    """
    wanted = _shapes_of_experts(weights)
    for part in version.experts[name]:
        got = _shapes_of_experts(part.weights)
        if got != wanted or part.computes != computes(experts):
            raise ValueError(
                f"experts of {name!r} must have {wanted} that compute {computes(experts)}, got "
                f"{got} that compute {part.computes}"
            )


def _shapes_of_experts(weights: Tensors) -> dict[str, tuple[int, ...]]:
    """The shape of one expert's part of each weight, by name. Scales of fp8 are left out, since
    the trainer sends none.
    """
    scales = _SCALES.values()
    return {name: tuple(value.shape[1:]) for name, value in weights.items() if name not in scales}
