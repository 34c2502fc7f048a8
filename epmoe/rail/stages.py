"""Dispatch and combine over several nodes: slabs between the nodes, and the stages of one node inside each."""

from __future__ import annotations

from torch import Tensor

from epmoe.exchange import combine as inside_combine
from epmoe.exchange import dispatch as inside_dispatch
from epmoe.exchange import round_state as rounds
from epmoe.exchange.handles import Dispatched, Layout, Sent
from epmoe.exchange.health import EPMismatchError, EPTimeoutError
from epmoe.exchange.round_state import PHASES, SENT
from epmoe.native.arguments import aligned_rows, contiguous_rows, describe, token_count
from epmoe.rail.exchange import RETURN_S, TwoLevels
from epmoe.rail.slabs import Slabs


def dispatch(
    exchange: TwoLevels,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    scales: Tensor | None,
    num_tokens: int | Tensor | None,
    layout: Layout,
    weight_rows: bool,
    padded_tokens: int | None = None,
    tag: int = 0,
) -> Dispatched:
    """Both phases; see `ExpertParallel.dispatch`."""
    sent = dispatch_send(exchange, x, ids, weights, scales, num_tokens, layout, weight_rows, padded_tokens, tag)
    return dispatch_recv(exchange, sent)


def dispatch_send(
    exchange: TwoLevels,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    scales: Tensor | None,
    num_tokens: int | Tensor | None,
    layout: Layout,
    weight_rows: bool,
    padded_tokens: int | None = None,
    tag: int = 0,
) -> Sent:
    """Pack the slabs and start their transfer; waits for no rank, except after an abort."""
    exchange.enter()
    try:
        epoch = rounds.check_closed(exchange)
        if tag.__class__ is not int or not 0 <= tag <= rounds.MAX_TAG:
            inside_dispatch.refuse_tag(tag)
        template = inside_dispatch.checked_template(exchange, x, ids, weights, scales, layout, weight_rows)
        _check_fp8(exchange, x)
        slots = _slots(exchange, padded_tokens)
        T = x.shape[0]
        scalar, rows = (None, T) if num_tokens is None else token_count(num_tokens, T, exchange.device)
        exchange.wait_for_given_up()
        sent = rounds.opened(exchange, template, T, epoch, tag, template.descriptors[0], ())
        like = ids.shape[1], x.shape[1], x.dtype
        exchange.travelling = slabs = Slabs(exchange, like, slots, layout, weight_rows, epoch, tag)
        slabs.pack(aligned_rows(x), contiguous_rows(ids), contiguous_rows(weights), scales, scalar, rows)
        exchange.rounds.progress[PHASES] += 1  # before other ranks hear of it: an abort then starts what is not started
        slabs.start()
        return sent
    finally:
        exchange.thread = 0


def dispatch_recv(exchange: TwoLevels, sent: Sent) -> Dispatched:
    """Wait for the slabs of the other nodes, and dispatch the rows of all slabs inside the node."""
    exchange.enter()
    try:
        exchange.check()
        rounds.expect(exchange, sent, "dispatch_recv", "sent")
        slabs, inside = exchange.travelling, exchange.inside
        assert slabs is not None
        slabs.finish()
        exchange.wait(slabs.transfer)
        differing, tags = slabs.differing()
        rows = slabs.smallest_rows() if differing else slabs.rows()  # the other ranks of the node hear of it
        try:
            if isinstance(opened := inside.rounds.handle, Sent) and inside.rounds.state == SENT:  # after a Ctrl-C
                slabs.inside = inside_dispatch.dispatch_recv(inside, opened)
            else:
                slabs.inside = inside_dispatch.dispatch(
                    inside, *rows, None, slabs.layout, slabs.weight_rows, tag=slabs.call_tag
                )
        except EPMismatchError as error:
            ranks = differing or exchange.of_group(sum(1 << rank for rank in error.differing_ranks))
            exchange.mismatch(ranks, differing, tags or exchange.tags_of_group(error.tags))
        except EPTimeoutError:
            exchange.check()
            raise
        if differing:
            exchange.mismatch(differing, differing, tags)
        exchange.rounds.progress[PHASES] += 1
        return rounds.dispatched(exchange, sent)
    finally:
        exchange.thread = 0


def combine(exchange: TwoLevels, expert_rows: Tensor, dispatched: Dispatched, out: Tensor | None = None) -> Tensor:
    """Both phases, from expert-major rows [N, D]; see `ExpertParallel.combine`."""
    return _combined(exchange, expert_rows, dispatched, "combine", "expert", out)


def combine_partial(exchange: TwoLevels, partial: Tensor, dispatched: Dispatched, out: Tensor | None = None) -> Tensor:
    """Both phases, from rank-major rows: G slabs, each of N·S rows."""
    return _combined(exchange, partial, dispatched, "combine_partial", "rank", out)


def combine_send(exchange: TwoLevels, rows: Tensor, dispatched: Dispatched, out: Tensor | None = None) -> None:
    """The send phase of the node's combine; waits for no rank."""
    exchange.enter()
    try:
        rounds.permit(exchange, dispatched, "combine_send")
        _send(exchange, rows, dispatched, out)
    finally:
        exchange.thread = 0


def combine_recv(exchange: TwoLevels, dispatched: Dispatched) -> Tensor:
    """The receive phase of the node's combine, then the way back to the sources, and their sums."""
    exchange.enter()
    try:
        exchange.check()
        rounds.expect(exchange, dispatched, "combine_recv")
        return _received(exchange, dispatched)
    finally:
        exchange.thread = 0


def _combined(
    exchange: TwoLevels, rows: Tensor, dispatched: Dispatched, call: str, layout: Layout, out: Tensor | None
) -> Tensor:
    exchange.enter()
    try:
        rounds.permit(exchange, dispatched, call)
        if dispatched.layout != layout:
            inside_combine.refuse_layout(dispatched)
        _send(exchange, rows, dispatched, out)
        return _received(exchange, dispatched)
    finally:
        exchange.thread = 0


def _send(exchange: TwoLevels, rows: Tensor, dispatched: Dispatched, out: Tensor | None) -> None:
    slabs = exchange.travelling
    assert slabs is not None
    y = inside_combine.y_of(exchange, dispatched, out)
    inside_combine.combine_send(exchange.inside, rows, slabs.inside)
    exchange.rounds.y = y
    exchange.rounds.progress[PHASES] += 1


def _received(exchange: TwoLevels, dispatched: Dispatched) -> Tensor:
    slabs, y = exchange.travelling, exchange.rounds.y
    assert slabs is not None and y is not None
    if not slabs.returning:  # otherwise a Ctrl-C has ended the wait below
        try:
            partial = inside_combine.combine_recv(exchange.inside, slabs.inside)
        except (EPMismatchError, EPTimeoutError):
            exchange.check()
            raise
        slabs.send_back(partial, exchange.take_aborted())
    exchange.wait(slabs.transfer, RETURN_S)
    elsewhere, differing = slabs.told()
    if differing:
        exchange.close_round()
        raise EPMismatchError(dispatched.epoch, differing, False)
    slabs.sum(y)
    for rank in elsewhere:
        exchange.aborted_rounds[rank] += 1
    exchange.aborted = sorted({*exchange.aborted, *elsewhere})
    exchange.rounds.progress[PHASES] += 1
    return rounds.closed(exchange, y)


def _slots(exchange: TwoLevels, padded_tokens: int | None) -> int:
    """n, the rows of a padded slab. Raises TypeError or ValueError for a number that cannot be one."""
    S = exchange.config.rows_per_node
    if padded_tokens is None:
        exchange.slots, exchange.limit = S, "capacity.max_rows_per_node"
    elif isinstance(padded_tokens, bool) or not isinstance(padded_tokens, int):
        raise TypeError(f"`padded_tokens` must be an int, got {describe(padded_tokens)}")
    elif not 1 <= padded_tokens <= S:
        raise ValueError(f"`padded_tokens` must be from 1 to {S}, the rows of a slab, got {padded_tokens}")
    else:
        exchange.slots, exchange.limit = padded_tokens, "padded_tokens"
    return exchange.slots


def _check_fp8(exchange: TwoLevels, x: Tensor) -> None:
    """Raises TypeError for rows that combine would bring back in another dtype: inside a node all rows are fp8 then."""
    dtype = exchange.config.model.torch_dtype
    if exchange.sends_fp8 and x.dtype.itemsize > 1 and x.dtype is not dtype:
        raise TypeError(f"`x` must be {dtype} or float8_e4m3fn, as rows reach the nodes as fp8, got {describe(x)}")
