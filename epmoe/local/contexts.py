"""Contexts around the forward pass of a model: `replay` gives its layers routes, `adapters_of` the
adapter of each token.

A call looks for inputs in the contexts of its own thread. A checkpoint computes a part of the model
again in the backward pass, after the context has ended and perhaps on another thread. It first
reads its inputs, which are saved tensors. Each saved tensor knows its context, and notes it at the
node of the graph that reads it. The call finds it there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from epmoe.group.errors import EPStateError
from epmoe.local.records import unpack_routes, with_own_choice
from epmoe.native.arguments import INTS, describe

if TYPE_CHECKING:
    from numpy.typing import NDArray

Routing = tuple[Tensor, Tensor | None]
"""ids [T, K] and weights [T, K]; None: those of the layer's own router"""
# Parts of names that wrappers of torch add.
_WRAPPERS = {
    "_orig_mod",
    "_checkpoint_wrapped_module",
    "_fsdp_wrapped_module",
    "module",
}
# Key of a node's metadata.
_KEY = "epmoe.context"
_counting = RLock()


class Record(Protocol):
    """The routes of one layer, in a `replay`."""

    def take(self, is_recompute: bool, x: Tensor) -> Routing:
        """The routes of the next call, or of the call that a checkpoint computes again.

        Raises ValueError if there are none, and EPStateError if a checkpoint may mean one of
        several calls.
        """
        ...


class _OfAllCalls(NamedTuple):
    """One entry for all calls."""

    routing: Routing

    def take(self, is_recompute: bool, x: Tensor) -> Routing:
        return self.routing


class _OfEachCall:
    """An entry for each call, in order."""

    def __init__(self, routings: list[Routing]) -> None:
        self.routings = routings
        self.calls = 0

    def take(self, is_recompute: bool, x: Tensor) -> Routing:
        if is_recompute and len(self.routings) > 1:
            raise EPStateError(_ONE_PASS_EACH)
        call = 0 if is_recompute else self.calls
        if call == len(self.routings):
            raise ValueError(f"`routes` has {call} calls of a layer, which is called once more")
        self.calls = call + 1
        return self.routings[call]


class _OfTokens:
    """Ids [B, tokens, K]. Each call takes the next tokens of each sequence."""

    def __init__(self, ids_BTK: Tensor) -> None:
        self.ids_BTK = ids_BTK
        # Tokens of a sequence that calls have taken.
        self.tokens = 0

    def take(self, is_recompute: bool, x: Tensor) -> Routing:
        """Take the next tokens of each sequence, as many as the call has."""
        sequences, length, _ = self.ids_BTK.shape
        rows = x.shape[:-1].numel()
        if is_recompute and self.tokens * sequences != rows:
            raise EPStateError(_ONE_PASS_EACH)
        if x.dim() == 3 and sequences not in (1, len(x)):
            raise ValueError(
                f"`routes` has {sequences} sequences, but a call of a layer has {len(x)}"
            )
        start = 0 if is_recompute else self.tokens
        end = start + rows // sequences
        if rows % sequences or end > length:
            left = f"{length - start} tokens left, in each of {sequences} sequences"
            raise ValueError(f"`routes` has {left}, but a call of a layer has {rows} in all")
        self.tokens = end
        return self.ids_BTK[:, start:end].flatten(0, 1), None


class _Context:
    """The inputs that one `replay` or `adapters_of` gives to layers. A graph of their calls keeps
    it alive.
    """

    def __init__(
        self,
        layers: Mapping[Any, Record] | Sequence[Any],
        *,
        adapter_ids: Tensor | None = None,
    ) -> None:
        # The layers; those of a `replay` with their routes.
        self.layers = layers
        self.adapter_ids = adapter_ids
        # Calls whose backward pass is still to come.
        self.awaited = 0
        # The number of the backward pass in which the context is made, or −1.
        self.task = torch._C._current_graph_task_id()
        self.outer = _contexts.get()
        _count(layers, 1)
        weakref.finalize(self, _count, layers, -1).atexit = False

    @property
    def is_replay(self) -> bool:
        """Whether it gives routes; otherwise it gives adapters."""
        return self.adapter_ids is None

    def take_routing(self, layer: nn.Module, is_recompute: bool, x: Tensor) -> Routing:
        """The routes of a layer's next call, or of the call that a checkpoint computes again."""
        assert isinstance(self.layers, Mapping)
        record: Record = self.layers[layer]
        return record.take(is_recompute, x)

    def await_gradient(self, x: Tensor) -> None:
        """Count a call as awaited until the gradient of its x is there."""

        def arrived(_: Tensor) -> None:
            handle.remove()
            self.awaited -= 1

        self.awaited += 1
        handle = x.register_hook(arrived)

    def pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Make what is saved in place of a tensor, with its version. The tensor itself would keep
        its own graph alive.
        """
        return tensor.detach(), tensor._version

    def unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        """Return the saved tensor, and note the context at the node that reads it. Raises what
        torch does if the tensor has changed.
        """
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                f"{describe(tensor)}, which a gradient needs, was modified by an inplace operation"
            )
        node = torch._C._current_autograd_node()
        if node is not None:
            node.metadata[_KEY] = weakref.ref(self)  # type: ignore[index]
        return tensor


_UNKNOWN = (
    "a checkpoint computes a layer's call again, and does not say which one of those that `replay` "
    "has routed"
)
_ONE_PASS_EACH = f"{_UNKNOWN}: give each forward pass a `replay` of its own"
_contexts: ContextVar[tuple[_Context, ...]] = ContextVar("epmoe.given", default=())
_last: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_Context]] = weakref.WeakKeyDictionary()


@contextmanager
def replay(model: nn.Module, routes: Mapping[str, Any] | Tensor | NDArray[Any]) -> Iterator[None]:
    """Within it each layer of a model takes these experts and weights, not those of its router.

    A checkpoint that computes a part of the model again, also after the context, takes them again.
    Other threads do not take them. Contexts may be nested: the innermost one of a layer holds, and
    `routing=` of a call holds before all.

    Args:
        model: whose layers are `MoELayer`s, in wrappers of torch or not; or a layer, whose name is
            then "".
        routes: what `recording` yields: for the name of each layer a list with the `Routes` of each
            call. A call may also have ids int32 or int64 [T, K] and weights [T, K], or ids alone,
            which the layer's own router weighs, with gradients; and a layer one entry for all its
            calls. Or records [tokens, layers, K] or [B, tokens, layers, K] of ids alone, a tensor
            or an array of numpy, as `pack_routes` makes them: layers are in the order of the model,
            and each call takes the next tokens of each sequence, as in `generate`. In both forms of
            ids alone, a token whose ids are not K experts has no record, and takes the router's
            choice.

    Yields:
        Nothing.

    Raises:
        TypeError: `routes` or an entry is something else.
        ValueError: `routes` has not the model's layers, or a tensor has another shape than K. A
            call raises it where its layer has no routes left, or where they are not those of its
            tokens.
        EPStateError: in a backward pass, where a checkpoint computes a call again and does not say
            which one it is: its forward pass had several calls of the layer, or other hooks of
            saved tensors within the context; or it had no `replay`, while the backward pass of one
            that had is still to come.
    """
    layers = layers_of(model)
    if isinstance(routes, Mapping):
        context = _Context(_by_call(routes, layers))
    elif hasattr(routes, "__array__"):
        context = _Context(_by_token(torch.as_tensor(routes), list(layers.values())))
    else:
        raise TypeError(f"`routes` must be a mapping, a tensor or an array, got {describe(routes)}")
    with _within(context), saved_tensors_hooks(context.pack, context.unpack):
        yield


def _by_token(routes: Tensor, layers: list[Any]) -> dict[Any, Record]:
    if not layers:
        raise ValueError("`model` has no MoELayer")
    model = layers[0].ep.config.model
    ids = unpack_routes(
        routes, len(layers), model.num_experts, model.num_experts_per_tok, layers[0].ep.device
    )
    return {layer: _OfTokens(of_layer) for layer, of_layer in zip(layers, ids, strict=True)}


def _by_call(routes: Mapping[str, Any], layers: dict[str, Any]) -> dict[Any, Record]:
    given = {name_without_wrappers(name): value for name, value in routes.items()}
    odd = sorted(layers.keys() ^ given.keys())
    if odd:
        what = "is no layer of the model" if odd[0] in given else "has none"
        raise ValueError(
            f"`routes` must have one entry for each of {len(layers)} layers, but {odd[0]!r} {what}"
        )
    return {layers[name]: _checked(name, value, layers[name]) for name, value in given.items()}


@contextmanager
def adapters_of(model: nn.Module, ids: Tensor) -> Iterator[None]:
    """Within it the tokens of a model's layers with `adapters` have these adapters, as by
    `adapter_ids` of each call.

    It holds for `generate`, too. Other threads have other adapters, or none. Contexts may be
    nested: the innermost one holds, and `adapter_ids=` of a call holds before all.

    Args:
        model: whose layers are `MoELayer`s, some of them with `adapters`; or one such layer.
        ids: int16, int32 or int64: [T] or [B, T], a number for each token; or [B], one for each
            sequence of [B, T] tokens. −1 means no adapter.

    Yields:
        Nothing.

    Raises:
        TypeError: `ids` is no tensor.
        ValueError: no layer has `adapters`. A call raises it where `ids` are not those of its
            tokens.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(
            f"`ids` must be a tensor of integers [T], [B, T] or [B], got {describe(ids)}"
        )
    layers = [layer for layer in layers_of(model).values() if layer.adapters is not None]
    if not layers:
        raise ValueError("`model` has no MoELayer with `adapters`")
    with _within(_Context(layers, adapter_ids=ids)):
        yield


class ContextInputs(NamedTuple):
    """The inputs that a call of a layer gets from the contexts around it."""

    x: Tensor
    """[T, D] or [B, T, D], for the experts, in place of the call's x"""
    routing: Routing | None
    adapter_ids: Tensor | None
    """[T] or [B, T]"""


def take_context_inputs(layer: nn.Module, x: Tensor) -> ContextInputs:
    """Take what contexts give to a call of a layer, such as the next routes of a `replay`.

    x is [T, D] or [B, T, D]. Raises what `replay` says of calls.
    """
    # The contexts of this thread, of the same pass; in a checkpoint's, those of the former call.
    task = torch._C._current_graph_task_id()
    active = []
    for context in _contexts.get():
        if context.task == task and layer in context.layers:
            active.append(context)
    is_recompute = task != -1 and not active
    if is_recompute:
        active = [context for context in _of_former_call(layer) if layer in context.layers]

    # The innermost context of each kind holds.
    replay_context = None
    adapters_context = None
    for context in active:
        if context.is_replay:
            replay_context = context
        else:
            adapters_context = context

    routing = None
    if replay_context is not None:
        routing = replay_context.take_routing(layer, is_recompute, x)
        _last[layer] = weakref.ref(replay_context)
        x = _with_gradient(layer, x)
        if x.requires_grad and not is_recompute:
            replay_context.await_gradient(x)

    adapter_ids = None
    if adapters_context is not None:
        adapter_ids = adapters_context.adapter_ids
    # One for each sequence holds for all its tokens.
    if adapter_ids is not None and x.dim() == 3 and adapter_ids.shape == x.shape[:1]:
        adapter_ids = adapter_ids[:, None].expand(x.shape[:2])
    return ContextInputs(x, routing, adapter_ids)


def _with_gradient(layer: nn.Module, x: Tensor) -> Tensor:
    """Make x require grad if the call has a backward pass. If all layers before are frozen, nobody
    needs this gradient, but it shows that the backward pass has reached the call.

    A checkpoint does the same with the x that it computes again, so that it saves as many tensors.
    """
    if x.requires_grad or not torch.is_grad_enabled():
        return x
    if not any(parameter.requires_grad for parameter in layer.parameters()):
        return x
    return x.detach().requires_grad_()


def _of_former_call(layer: nn.Module) -> tuple[_Context, ...]:
    """The contexts of the call that a checkpoint computes again, in the node of a graph that runs
    now.
    """
    # The node has read a tensor that was saved in a context.
    node = torch._C._current_autograd_node()
    if node is not None:
        noted = node.metadata.get(_KEY)  # type: ignore[attr-defined]
        context: _Context | None = None if noted is None else noted()
        if context is not None:
            return (*context.outer, context)
    # It has not. Then the call must be none that a `replay` has routed.
    of_layer = _last.get(layer)
    last = None if of_layer is None else of_layer()
    if last is not None and last.awaited:
        raise EPStateError(
            f"{_UNKNOWN}: other hooks of saved tensors, such as those that offload them, must be "
            "outside of `replay`, and the backward pass of a forward pass without `replay` must "
            "not come between that of one with it"
        )
    return ()


@contextmanager
def _within(context: _Context) -> Iterator[None]:
    token = _contexts.set((*context.outer, context))
    try:
        yield
    finally:
        _contexts.reset(token)


def layers_of(model: nn.Module) -> dict[str, Any]:
    """The `MoELayer`s of a model, by their names without wrappers of torch."""
    layers = {}
    for name, module in model.named_modules():
        if hasattr(module, "contexts"):
            layers[name_without_wrappers(name)] = module
    return layers


def name_without_wrappers(name: str) -> str:
    """The name of a module or a tensor as it was before torch.compile, DDP, FSDP or
    `checkpoint_wrapper` took its module.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _count(layers: Iterable[Any], by: int) -> None:
    with _counting:
        for layer in layers:
            layer.contexts += by


def _checked(name: str, value: Any, layer: Any) -> Record:
    """The routes of a layer: a list has an entry for each call, anything else is for all calls."""
    if isinstance(value, list):
        return _OfEachCall([_pair(name, each, layer) for each in value])
    return _OfAllCalls(_pair(name, value, layer))


def _pair(name: str, value: Any, layer: Any) -> Routing:
    """Check one entry of `routes`: ids and perhaps weights, flattened to [T, K]."""
    # `Routes` begin with both.
    ids = value
    weights = None
    if isinstance(value, tuple):
        ids = value[0] if value else None
        weights = value[1] if len(value) > 1 else None
    if not isinstance(ids, Tensor) or not isinstance(weights, Tensor | None):
        raise TypeError(
            f"`routes[{name!r}]` must be `Routes`, ids and weights, or ids, got {describe(value)}"
        )
    K = layer.ep.config.model.num_experts_per_tok
    ids = ids.flatten(0, -2)
    got = describe(ids)
    fits = ids.shape[1:] == (K,)
    if weights is not None:
        weights = weights.flatten(0, -2)
        got += f" and {describe(weights)}"
        fits = fits and weights.shape == ids.shape
    if not fits:
        raise ValueError(f"`routes[{name!r}]` must have ids and weights [T, {K}], got {got}")
    if weights is None and ids.dtype in INTS:
        ids = with_own_choice(ids, layer.ep.config.model.num_experts)
    return ids, weights
