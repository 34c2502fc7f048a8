"""`recording`: a context that records which experts the layers of a model have chosen.

Auxiliary losses and updates of router biases use the records, and `replay` can repeat them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from traceback import walk_stack
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


class Routes(NamedTuple):
    """What one call of a layer has chosen for its T tokens."""

    ids: Tensor
    """The K logical experts of each token, int32 or int64 [T, K]. Tokens of padding have E. In a
    call with gradients, an expert whose weight is 0 is −1.
    """
    weights: Tensor
    """The weights of these experts, fp32 [T, K]. They have gradients if the call has."""
    logits: Tensor | None
    """The logits of the router, [T, E] in its dtype. They have gradients if the call has. None: the
    router did not choose, since the caller or a `replay` gave the routing.
    """
    tokens_per_expert: Tensor | None
    """int32 [e]: how many rows each expert of this rank got from all ranks. None: the call had no
    gradients, and the memory of this count belongs to the next round.
    """


@contextmanager
def recording(module: nn.Module) -> Iterator[dict[str, list[Routes]]]:
    """Record the `Routes` of each call of a model's layers within this context.

    The recorded tensors are those of the calls, not copies. If a CUDA graph is captured within this
    context, each replay of the graph writes into them, also after the context has ended. Compiled
    layers without gradients are recorded, too. Not recorded are calls on other threads, and calls
    that activation checkpointing repeats in a backward pass.

    Args:
        module: a model; or a single layer, whose name is then "".

    Yields:
        A dict. For the name of each `MoELayer` it has a list with the `Routes` of each call, in the
        order of the calls.

    Raises:
        RuntimeError: a backward pass comes to recorded weights or logits of a reentrant checkpoint,
            whose first forward pass has no gradients.
    """
    # Find the layers, and make a recorder for each of them. `here` identifies this context.
    here = object()
    task = torch._C._current_graph_task_id()
    calls: dict[str, list[Routes]] = {}
    recorded: list[tuple[Any, Callable[[Routes], object]]] = []
    for name, part in module.named_modules():
        if hasattr(part, "recorders"):
            calls[name] = []
            recorded.append((part, partial(_record, calls[name], here, task)))

    token = _open.set((*_open.get(), here))
    for layer, recorder in recorded:
        layer.recorders.append(recorder)
    try:
        yield calls
    finally:
        for layer, recorder in recorded:
            layer.recorders.remove(recorder)
        _open.reset(token)


def record(recorders: list[Callable[[Routes], object]], routes: Routes) -> None:
    """Give the routes of a call to all recorders of its layer.

    The list is copied first, since another thread may begin or end a `recording` meanwhile.
    """
    for recorder in tuple(recorders):
        recorder(routes)


_open: ContextVar[tuple[object, ...]] = ContextVar("epmoe.recording", default=())
"""The `recording` contexts that are open on this thread"""


def _record(calls: list[Routes], here: object, task: int, routes: Routes) -> None:
    """Append the routes of a call to `calls`, the record of the context `here`.

    A call counts only if it runs on the thread that has opened the context, and in the same pass:
    `task` is the number of the backward pass in which the context was opened, or −1.
    """
    # Leave out calls on other threads, and calls that a checkpoint repeats in a backward pass. This
    # is not asked while dynamo traces a call.
    compiles = torch.compiler.is_compiling()
    if not compiles and (here not in _open.get() or torch._C._current_graph_task_id() != task):
        return
    # In the first forward pass of a reentrant checkpoint nothing has gradients, so that a loss of
    # the record would silently have none. Let its backward pass raise instead.
    if not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()) and _in_function():
        logits = routes.logits
        if logits is not None:
            logits = _without_gradients(logits)
        routes = routes._replace(weights=_without_gradients(routes.weights), logits=logits)
    calls.append(routes)


def _in_function() -> bool:
    """Whether the forward pass of an autograd.Function is running on this thread.

    A reentrant checkpoint is such a function. It is found by its frame on the stack.
    """
    for frame, _ in walk_stack(None):
        is_forward = frame.f_code.co_name == "forward"
        if is_forward and isinstance(frame.f_locals.get("ctx"), FunctionCtx):
            return True
    return False


def _without_gradients(value: Tensor) -> Tensor:
    """Return the same values, such that a backward pass that comes to them raises an error.

    Otherwise their gradients would silently be lost.
    """
    value = value.detach().requires_grad_()
    value.register_hook(_refuse)
    return value


def _refuse(_: Tensor) -> NoReturn:
    """Raise the error of `_without_gradients`. torch calls it with a gradient."""
    raise RuntimeError(
        "a loss of recorded weights or logits has no gradients in a reentrant checkpoint, whose "
        "first pass has none: checkpoint with use_reentrant=False"
    )
