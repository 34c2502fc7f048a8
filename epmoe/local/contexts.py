"""What a host gives all layers of a model around its forward pass: routes to replay, and the
adapter of each token.

A call finds what is given in the contexts of its own thread. A checkpoint computes a part of the
model again in the backward pass, after the context and perhaps on another thread. It reads its
inputs first, which are saved tensors: each of them knows the context in which it was saved, and
leaves it at the node of the graph that reads it.
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
_WRAPPERS = {
    "_orig_mod",
    "_checkpoint_wrapped_module",
    "_fsdp_wrapped_module",
    "module",
}  # parts of names
_KEY = "epmoe.given"  # of a node's metadata
_counting = RLock()


class Record(Protocol):
    """The routes of one layer, in a `replay`."""

    def take(self, is_recompute: bool, x: Tensor) -> Routing:
        """Those of the next call, or of the one call that a checkpoint computes again. Raises
        ValueError where there are none, and EPStateError where nothing says which call it is.
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
    """Ids [B, tokens, K], of which each call takes the next tokens of each sequence."""

    def __init__(self, ids_BTK: Tensor) -> None:
        self.ids_BTK = ids_BTK
        self.tokens = 0  # of a sequence, so far

    def take(self, is_recompute: bool, x: Tensor) -> Routing:
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
    """What one `replay` or `adapters_of` gives to its layers. A graph of their calls keeps it
    alive.
    """

    def __init__(
        self,
        layers: Mapping[Any, Record] | Sequence[Any],
        *,
        adapter_ids: Tensor | None = None,
    ) -> None:
        self.layers = layers  # of a `replay`, with their routes
        self.adapter_ids = adapter_ids
        self.awaited = 0  # calls whose backward pass is still to come
        self.task = (
            torch._C._current_graph_task_id()
        )  # of the backward pass that it is made in, or −1
        self.outer = _contexts.get()
        _count(layers, 1)
        weakref.finalize(self, _count, layers, -1).atexit = False

    @property
    def is_replay(self) -> bool:
        """Whether it has routes, and not adapters."""
        return self.adapter_ids is None

    def take_routing(self, layer: nn.Module, is_recompute: bool, x: Tensor) -> Routing:
        """That of the next call of a layer, or of the one call that a checkpoint computes again."""
        assert isinstance(self.layers, Mapping)
        record: Record = self.layers[layer]
        return record.take(is_recompute, x)

    def await_gradient(self, x: Tensor) -> None:
        """Note that a call has routes, until the gradient of its x is there."""

        def arrived(_: Tensor) -> None:
            handle.remove()
            self.awaited -= 1

        self.awaited += 1
        handle = x.register_hook(arrived)

    def pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        """The value that is saved in place of a tensor, which itself would keep its own graph
        alive.
        """
        return tensor.detach(), tensor._version

    def unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        """The saved tensor, for the node of a graph which now knows the context. Raises what torch
        does.
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
    """What the contexts around a call of a layer give it."""

    x: Tensor
    """[T, D] or [B, T, D]: that of the call, of which the call takes this one"""
    routing: Routing | None
    adapter_ids: Tensor | None
    """[T] or [B, T]"""


def take_context_inputs(layer: nn.Module, x: Tensor) -> ContextInputs:
    """What contexts give to a call of a layer, whose x is [T, D] or [B, T, D]. It takes the next
    routes of a `replay`. Raises what `replay` says of calls.
    """
    task = torch._C._current_graph_task_id()
    active = [
        context for context in _contexts.get() if context.task == task and layer in context.layers
    ]
    is_recompute = task != -1 and not active
    if is_recompute:
        active = [context for context in _of_former_call(layer) if layer in context.layers]

    # The innermost context of each kind holds.
    replays = [context for context in active if context.is_replay]
    adapters = [context for context in active if not context.is_replay]
    routing = None
    if replays:
        innermost = replays[-1]
        routing = innermost.take_routing(layer, is_recompute, x)
        _last[layer] = weakref.ref(innermost)
        x = _with_gradient(layer, x)
        if x.requires_grad and not is_recompute:
            innermost.await_gradient(x)
    adapter_ids = adapters[-1].adapter_ids if adapters else None
    if adapter_ids is not None and x.dim() == 3 and adapter_ids.shape == x.shape[:1]:
        adapter_ids = adapter_ids[:, None].expand(x.shape[:2])  # one of each sequence
    return ContextInputs(x, routing, adapter_ids)


def _with_gradient(layer: nn.Module, x: Tensor) -> Tensor:
    """x, which requires grad where the call has a backward pass. Of a frozen front x needs none,
    but its gradient says when this backward pass has come as far.

    A checkpoint makes the same of the x that it computes again: it saves as many tensors then.
    """
    if x.requires_grad or not torch.is_grad_enabled():
        return x
    if not any(parameter.requires_grad for parameter in layer.parameters()):
        return x
    return x.detach().requires_grad_()


def _of_former_call(layer: nn.Module) -> tuple[_Context, ...]:
    """The contexts of the call that a checkpoint makes again in this node of a graph."""
    node = torch._C._current_autograd_node()
    of_node = None if node is None else node.metadata.get(_KEY)  # type: ignore[attr-defined]
    context: _Context | None = None if of_node is None else of_node()
    if context is not None:
        return (*context.outer, context)
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
    return {
        name_without_wrappers(name): each
        for name, each in model.named_modules()
        if hasattr(each, "contexts")
    }


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
    if isinstance(value, list):
        return _OfEachCall([_pair(name, each, layer) for each in value])
    return _OfAllCalls(_pair(name, value, layer))


def _pair(name: str, value: Any, layer: Any) -> Routing:
    ids, weights, *_ = (*value, None, None) if isinstance(value, tuple) else (value, None)
    if not isinstance(ids, Tensor) or not isinstance(weights, Tensor | None):
        raise TypeError(
            f"`routes[{name!r}]` must be `Routes`, ids and weights, or ids, got {describe(value)}"
        )
    K = layer.ep.config.model.num_experts_per_tok
    ids = ids.flatten(0, -2)
    weights = None if weights is None else weights.flatten(0, -2)
    if ids.shape[1:] != (K,) or weights is not None and weights.shape != ids.shape:
        got = describe(ids) if weights is None else f"{describe(ids)} and {describe(weights)}"
        raise ValueError(f"`routes[{name!r}]` must have ids and weights [T, {K}], got {got}")
    if weights is None and ids.dtype in INTS:
        ids = with_own_choice(ids, layer.ep.config.model.num_experts)
    return ids, weights
