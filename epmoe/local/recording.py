"""Records of what layers have chosen, for auxiliary losses, updates of biases, and replays of a
rollout's routes.
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
    """What a call of a layer has chosen."""

    ids: Tensor
    """int32 or int64 [T, K], logical experts; padding has E. A call with gradients has −1 where the
    weight is 0.
    """
    weights: Tensor
    """fp32 [T, K], with gradients in a call with gradients"""
    logits: Tensor | None
    """[T, E] in the dtype of the router, with gradients in a call with gradients; None where the
    routing was given
    """
    tokens_per_expert: Tensor | None
    """int32 [e], rows that this rank's experts have got from all ranks; None in a call without
    gradients, whose memory the next round overwrites
    """


@contextmanager
def recording(module: nn.Module) -> Iterator[dict[str, list[Routes]]]:
    """Record the `Routes` of each call of a model's layers within this context.

    The tensors are those of the calls. A CUDA graph that is captured within it writes into them in
    each replay, also afterwards. Compiled layers without gradients are recorded, too. Calls of
    other threads are not, nor those that a checkpoint makes again in a backward pass.

    Args:
        module: a model, or a layer, whose name is then "".

    Yields:
        For the name of each `MoELayer` a list with the `Routes` of each call, in their order.

    Raises:
        RuntimeError: in a backward pass through weights or logits of the first pass of a reentrant
            checkpoint, which has no gradients.
    """
    # The layers of epmoe, each with a recorder of its own.
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
    """Give a call's routes to all, also while another thread begins or ends a `recording`."""
    for recorder in tuple(recorders):
        recorder(routes)


_open: ContextVar[tuple[object, ...]] = ContextVar("epmoe.recording", default=())
"""The `recording`s of this thread"""


def _record(calls: list[Routes], here: object, task: int, routes: Routes) -> None:
    """Add a call to the record of the context `here`, if the same thread makes it, in the same pass
    of autograd, `task`.
    """
    # Leave out calls of other threads, and those that a checkpoint makes again in a backward pass.
    compiles = torch.compiler.is_compiling()
    if not compiles and (here not in _open.get() or torch._C._current_graph_task_id() != task):
        return
    # The first pass of a reentrant checkpoint has no gradients, which a loss could miss.
    if not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()) and _in_function():
        logits = routes.logits
        if logits is not None:
            logits = _without_gradients(logits)
        routes = routes._replace(weights=_without_gradients(routes.weights), logits=logits)
    calls.append(routes)


def _in_function() -> bool:
    """Whether the forward pass of an autograd.Function runs, such as the first pass of a reentrant
    checkpoint.
    """
    for frame, _ in walk_stack(None):
        is_forward = frame.f_code.co_name == "forward"
        if is_forward and isinstance(frame.f_locals.get("ctx"), FunctionCtx):
            return True
    return False


def _without_gradients(value: Tensor) -> Tensor:
    """Mark values, so that the backward pass of a loss of them raises: its gradients would be 0."""
    value = value.detach().requires_grad_()
    value.register_hook(_refuse)
    return value


def _refuse(_: Tensor) -> NoReturn:
    raise RuntimeError(
        "a loss of recorded weights or logits has no gradients in a reentrant checkpoint, whose "
        "first pass has none: checkpoint with use_reentrant=False"
    )
