"""How a group grows and shrinks between two rounds: a new rank joins it, and ranks leave it, whose
experts move to the ranks that stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.config.deadlines import LAST_CALL_S
from epmoe.config.placement import Move, is_int
from epmoe.exchange.processors import processor_of
from epmoe.group.errors import EPRefusedError, EPTimeoutError
from epmoe.group.recovery import Confirm, Wanted, regroup, take_in
from epmoe.group.store import Store
from epmoe.live.balancer import Balancer
from epmoe.live.layout import EMPTY
from epmoe.live.moves import SlotWeights
from epmoe.live.slots import keep_slots
from epmoe.service import ExpertParallel

# Before ranks leave, all ranks try so many times to move the experts of these ranks to the others.
_MOST_TRIES_TO_MOVE = 2

_log = logging.getLogger("epmoe")


def join_group(
    store: Store,
    *,
    device: torch.device | str | None = None,
    timeout_s: float = 300.0,
    backend: str = "gloo",
) -> ExpertParallel:
    """Become a new rank of a group whose ranks call `recover` or `resize`. It waits for them.

    The caller loads the experts of this rank: `ep.logical_experts(tag)` says which they are, with
    `placement.live` in each layer. Experts that the others still hold move here by `ep.replace` or
    `Balancer`.

    Args:
        store: that of the other ranks' `recover`.
        device: the device of all tensors, as `ExpertParallel` takes it.
        timeout_s: how long to wait for the group, in seconds.
        backend: the backend of the process group, the same as in `recover`.

    Returns:
        The ExpertParallel, in the group.

    Raises:
        TimeoutError: nobody has taken this rank in within `timeout_s` seconds. Its cause is the
            error of the last attempt.
        ValueError: the store is a FileStore, or holds a decision that no rank has written.
        MemoryError: the windows do not fit.
        PermissionError: other users can write into the folder.
    """
    # Build and load the native library before others wait for this rank.
    if device is not None:
        device_type = torch.device(device).type
    elif torch.cuda.is_initialized():
        device_type = "cuda"
    else:
        device_type = "cpu"
    processor_of(torch.device(device_type)).load()

    # `take_in` calls it once the other ranks have taken this rank in.
    def make(config: EPConfig, confirm: Confirm) -> ExpertParallel:
        ep = ExpertParallel(config, device=device)
        try:
            if not confirm(lambda: len(ep.survivors()) < ep.size):
                raise RuntimeError("the group was not confirmed")
        except BaseException:
            ep.close()
            raise
        return ep

    return take_in(store, make, timeout_s, backend)


def resize(
    ep: ExpertParallel,
    store: Store,
    size: int,
    load_weights: Callable[[tuple[Move, ...]], object],
    *,
    balancer: Balancer | None = None,
    weights: SlotWeights | None = None,
    wait_s: float = 5.0,
    timeout_s: float = 300.0,
    backend: str = "gloo",
) -> bool:
    """Grow or shrink the group between two rounds. Every rank of the group calls it, with the same
    arguments.

    To grow, new processes call `join_group`. They best do so before the ranks call `resize`, since
    the ranks wait for them meanwhile. With `placement.live` the slots of new ranks are empty, and
    `Balancer` or `ep.replace` fills them.

    To shrink, the ranks from `size` on leave. With `placement.live` moves that are under way end
    first, and experts whose copies are all on leaving ranks move to the ranks that stay. In some
    cases these experts cannot move: the ranks that stay have too few slots, a rank dies or refuses
    the moves, or the ranks sleep. Then `load_weights` gets the experts, and loads them.

    Args:
        ep: the ExpertParallel that is to have another size.
        store: the store, as `recover` takes it.
        size: the number of ranks that the group is to have. The group has fewer if new ranks do not
            come within `wait_s`.
        load_weights: gets the moves of this rank, as in `recover`.
        balancer: the balancer of `ep`, if it has one.
        weights: the weights of slots, as `ExpertParallel.replace` takes them.
        wait_s: how long to wait for new ranks, in seconds.
        timeout_s: the limit of the whole call, in seconds, as in `recover`.
        backend: the backend of the process group.

    Returns:
        Whether this rank is in the group. On a rank that has left, `ep` is closed and its process
        may end.

    Raises:
        ValueError: `size` is not positive; and what `recover` and `ExpertParallel.replace` raise.
        EPStateError: that of `recover`, like TimeoutError and MemoryError.
    """
    if not is_int(size) or size < 1:
        raise ValueError(f"`size` must be an integer of at least 1, got {size!r}")
    last_call_s = ep.config.exchange.timeout_s + LAST_CALL_S
    wanted = Wanted(
        min_ranks=1,
        max_ranks=size,
        last_call_s=last_call_s,
        timeout_s=timeout_s,
        backend=backend,
        grow_s=wait_s,
        leaves=ep.rank >= size,
    )

    def move_and_regroup() -> bool:
        # Without windows no expert can move, and the weights are loaded instead. The windows have
        # gone in sleep, or in an earlier call that a signal handler has interrupted.
        has_windows = ep.life.opened is not None
        if ep.live.can_move and size < ep.size and has_windows:
            _move_to_staying_ranks(ep, size, balancer, weights)
        return regroup(ep, store, load_weights, wanted)

    return ep.life.alone(move_and_regroup)


def _move_to_staying_ranks(
    ep: ExpertParallel, size: int, balancer: Balancer | None, weights: SlotWeights | None
) -> None:
    """Move the experts that only leaving ranks hold to the ranks that stay, as far as these have
    slots. The ranks from `size` on leave.

    Collective: all ranks call it before the group becomes smaller. It never fails because ranks
    refuse the moves or are late: the experts that have not moved are loaded later. `balancer` and
    `weights` are the arguments of `resize`.
    """
    # After a timeout some ranks may have moved experts and others not. The group changes all the
    # same, and the ranks compare then which experts each has.
    with suppress(EPTimeoutError):
        # Wait for the end of moves that are under way.
        _end_moves(ep, balancer)

        # Begin the moves. If a signal handler interrupts `replace` on one rank, the moves are
        # refused on all ranks. That rank calls `resize` again, so the others try again, too.
        refusals: list[EPRefusedError] = []
        while len(refusals) < _MOST_TRIES_TO_MOVE:
            slots = _slots_without_leaving_ranks(ep, size)
            if slots is None:
                return
            ep.replace(slots, weights)
            refusals += _end_moves(ep, None)
        _log.warning("resize: experts are loaded, since they could not move: %s", refusals[-1])


def _end_moves(ep: ExpertParallel, balancer: Balancer | None) -> list[EPRefusedError]:
    """Wait for the end of all moves. Returns the error of moves that were refused, in a list that
    is empty if none were. No expert has moved by refused moves.
    """
    refusals = []
    try:
        if balancer is None:
            ep.apply()
        else:
            balancer.finish()
    except EPRefusedError as error:
        refusals.append(error)
        ep.apply()
    return refusals


def _slots_without_leaving_ranks(ep: ExpertParallel, size: int) -> Tensor | None:
    """Make the table of slots [layers, P] in which the ranks below `size` hold all experts, where P
    is the number of slots of all ranks. None if these ranks hold all experts already, or have too
    few slots.
    """
    slots = ep.slots
    S = ep.num_local_experts  # slots of a rank
    if size * S < ep.config.model.num_experts:
        return None

    # Keep the experts in the slots of the ranks that stay, and give free slots there to the experts
    # that have none.
    layers = slots.tolist()
    stay = []
    for rank in range(size):
        own = slice(rank * S, (rank + 1) * S)
        stay.append([layer[own] for layer in layers])
    kept = torch.tensor(keep_slots(ep.config, stay, spread_lost=True), dtype=slots.dtype)
    if torch.equal(kept, slots[:, : size * S]):
        return None

    # Empty the slots of the ranks that leave.
    slots.fill_(EMPTY)
    slots[:, : size * S] = kept
    return slots
