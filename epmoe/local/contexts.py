"""Contexts around the forward pass of a model that give inputs to its layers.

`replay` gives routes, and `adapters_of` gives the adapter of each token.

A call of a layer looks for its inputs in the contexts that are open on its own thread.

Activation checkpointing needs more than that. In the backward pass a checkpoint calls layers a
second time, when the context has ended, and perhaps on another thread. Before it does so, it reads
the saved tensors that are its inputs. A tensor that was saved within a `replay` is unpacked by a
hook of this context, and the hook writes a reference to the context into the metadata of the
autograd node that is running. The second call of the layer finds the context there.
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
# Parts that wrappers of torch add to the names of modules.
_WRAPPERS = {
    "_orig_mod",
    "_checkpoint_wrapped_module",
    "_fsdp_wrapped_module",
    "module",
}
# The key in an autograd node's metadata under which a context is found.
_KEY = "epmoe.context"
# Protects the counters of contexts in layers. It is reentrant, since a context may be garbage
# collected, and so counted, in a thread that is counting.
_counting = RLock()


class Record(Protocol):
    """The routes that a `replay` has for the calls of one layer."""

    def take(self, is_recompute: bool, x: Tensor) -> Routing:
        """Return the routes of the layer's next call, whose tokens are x [T, D] or [B, T, D].

        With `is_recompute`, a checkpoint repeats a former call, and the routes of that call are
        returned. Raises ValueError if no routes are left, and EPStateError if the checkpoint may
        mean one of several former calls.
        """
        ...


class _SameForAllCalls(NamedTuple):
    """A record in which all calls have the same routes."""

    routing: Routing

    def take(self, is_recompute: bool, x: Tensor) -> Routing:
        return self.routing


class _OneEntryPerCall:
    """A record with an entry for each call, in the order of the calls."""

    def __init__(self, routings: list[Routing]) -> None:
        self.routings = routings
        self.calls = 0

    def take(self, is_recompute: bool, x: Tensor) -> Routing:
        # A checkpoint does not say which of several calls it repeats. If there is only one call, it
        # must be that one.
        if is_recompute and len(self.routings) > 1:
            raise EPStateError(_ONE_PASS_EACH)
        call = 0 if is_recompute else self.calls
        if call == len(self.routings):
            raise ValueError(f"`routes` has {call} calls of a layer, which is called once more")
        self.calls = call + 1
        return self.routings[call]


class _TokenByToken:
    """A record with ids [B, tokens, K] for the tokens of B sequences.

    Each call takes as many of the next tokens of each sequence as it has, as `generate` does.
    """

    def __init__(self, ids_BTK: Tensor) -> None:
        self.ids_BTK = ids_BTK
        # How many tokens of each sequence former calls have taken.
        self.tokens = 0

    def take(self, is_recompute: bool, x: Tensor) -> Routing:
        """See `Record.take`. `tokens` advances, unless a checkpoint repeats the only call."""
        sequences, length, _ = self.ids_BTK.shape
        rows = x.shape[:-1].numel()
        # If one call has taken all tokens so far, a checkpoint must mean that call.
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
    """The inputs that one `replay` or `adapters_of` gives to layers.

    Autograd graphs that saved tensors within a `replay` keep its context alive, since they hold its
    `unpack`. A checkpoint can therefore use the context after the `with` block has ended.
    """

    def __init__(
        self,
        layers: Mapping[Any, Record] | Sequence[Any],
        *,
        adapter_ids: Tensor | None = None,
    ) -> None:
        # The layers that get inputs. In a `replay` it is a mapping, which has each layer's routes.
        self.layers = layers
        # The adapter of each token; None in a `replay`.
        self.adapter_ids = adapter_ids
        # How many calls of layers still wait for their backward pass.
        self.awaited = 0
        # The number of the backward pass that runs as the context is opened, or −1 for none.
        self.task = torch._C._current_graph_task_id()
        # The contexts around this one.
        self.outer = _contexts.get()
        # Each layer counts the contexts that may have inputs for it, so that a layer without any
        # need not look for them. At exit of the process nobody reads the counter any more.
        _count(layers, 1)
        weakref.finalize(self, _count, layers, -1).atexit = False

    @property
    def is_replay(self) -> bool:
        """Whether the context gives routes. Otherwise it gives adapters."""
        return self.adapter_ids is None

    def take_routing(self, layer: nn.Module, is_recompute: bool, x: Tensor) -> Routing:
        """Return the routes of a layer's call, see `Record.take`. Only for a `replay`."""
        assert isinstance(self.layers, Mapping)
        record: Record = self.layers[layer]
        return record.take(is_recompute, x)

    def await_gradient(self, x: Tensor) -> None:
        """Count a call in `awaited` until the backward pass computes the gradient of its x."""

        # torch calls it with the gradient, which is not needed here.
        def arrived(_: Tensor) -> None:
            handle.remove()
            self.awaited -= 1

        self.awaited += 1
        handle = x.register_hook(arrived)

    def pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Return what autograd saves in place of a tensor: a detached tensor, and its version.

        torch calls it as a hook for each saved tensor. The tensor itself would keep alive the graph
        that has computed it, and that graph would keep the tensor alive.
        """
        return tensor.detach(), tensor._version

    def unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        """Return a saved tensor, and let calls in the running node find this context.

        torch calls it as a hook when the backward pass reads a saved tensor. Raises RuntimeError,
        as torch itself does, if the tensor has changed since it was saved.
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
# The contexts that are open on this thread, the innermost last.
_contexts: ContextVar[tuple[_Context, ...]] = ContextVar("epmoe.given", default=())
# The `replay` that has last given routes to each layer.
_last_replay: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_Context]] = (
    weakref.WeakKeyDictionary()
)


@contextmanager
def replay(model: nn.Module, routes: Mapping[str, Any] | Tensor | NDArray[Any]) -> Iterator[None]:
    """Let the layers of a model use given experts and weights within this context.

    The layers then do not use the choice of their routers. If activation checkpointing calls a
    layer again in the backward pass, also after the context has ended, the layer gets the same
    routes again. Calls on other threads get no routes. Contexts may be nested: a layer gets the
    routes of the innermost context that has routes for it. The argument `routing=` of a call takes
    precedence over all contexts.

    Args:
        model: a model whose MoE blocks are `MoELayer`s, with or without wrappers of torch; or a
            single layer, whose name is then "".
        routes: a mapping or records. A mapping is what `recording` yields: for the name of each
            layer, a list with the `Routes` of each call. In place of `Routes` an entry may be a
            pair of ids, int32 or int64 [T, K], and weights [T, K]; or only ids, and then the
            layer's router computes the weights, with gradients. In place of a list, a layer may
            have one entry, which holds for all its calls. Records are what `pack_routes` makes:
            ids without weights, [tokens, layers, K] or [B, tokens, layers, K], as a tensor or a
            numpy array. The layers are in the order of the model, and each call takes the next
            tokens of each sequence, as in `generate`. Wherever there are ids without weights, a
            token whose ids are not K different experts has no record, and its layer's router
            chooses the experts.

    Yields:
        Nothing.

    Raises:
        TypeError: `routes` or an entry of it has another type.
        ValueError: `routes` has other layers than the model, or K is not the last dimension of a
            tensor. A call of a layer raises it if no routes are left for the layer, or if the
            routes are those of another number of tokens.
        EPStateError: a checkpoint calls a layer again in the backward pass, and it is not known
            which former call it repeats. Either the forward pass has called the layer several
            times, or there were other hooks of saved tensors within the context, or the forward
            pass ran without `replay` while the backward pass of another one with `replay` is still
            to come.
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
    """Make the record of each layer from records [tokens, layers, K] or [B, tokens, layers, K]."""
    if not layers:
        raise ValueError("`model` has no MoELayer")
    model = layers[0].ep.config.model
    ids = unpack_routes(
        routes, len(layers), model.num_experts, model.num_experts_per_tok, layers[0].ep.device
    )
    return {layer: _TokenByToken(ids_BTK) for layer, ids_BTK in zip(layers, ids, strict=True)}


def _by_call(routes: Mapping[str, Any], layers: dict[str, Any]) -> dict[Any, Record]:
    """Make the record of each layer from a mapping of layers' names to their entries."""
    entries = {name_without_wrappers(name): value for name, value in routes.items()}
    unmatched = sorted(layers.keys() ^ entries.keys())
    if unmatched:
        name = unmatched[0]
        what = "is no layer of the model" if name in entries else "has none"
        raise ValueError(
            f"`routes` must have one entry for each of {len(layers)} layers, but {name!r} {what}"
        )
    records = {}
    for name, value in entries.items():
        records[layers[name]] = _record_of(name, value, layers[name])
    return records


@contextmanager
def adapters_of(model: nn.Module, ids: Tensor) -> Iterator[None]:
    """Let the layers of a model use these adapters for their tokens within this context.

    Each layer with `adapters` computes as if its call had the argument `adapter_ids=ids`. This
    works for `generate`, too. Calls on other threads do not get these adapters. Contexts may be
    nested: the innermost context counts. The argument `adapter_ids=` of a call takes precedence
    over all contexts.

    Args:
        model: a model whose MoE blocks are `MoELayer`s, some of them with `adapters`; or one such
            layer.
        ids: the number of an adapter for each token, int16, int32 or int64 [T] or [B, T]; or [B],
            a number for each sequence of tokens [B, T]. −1 means no adapter.

    Yields:
        Nothing.

    Raises:
        TypeError: `ids` is not a tensor.
        ValueError: no layer of the model has `adapters`. A call of a layer raises it if `ids` are
            those of another number of tokens.
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
    """The inputs that a call of a layer takes, with those of the contexts around it."""

    x: Tensor
    """[T, D] or [B, T, D]: the experts' input in place of the call's x, which may require grad
    where the call's x does not
    """
    routing: Routing | None
    """None: no context gives routes"""
    adapter_ids: Tensor | None
    """[T] or [B, T]; None: no context gives adapters"""


def take_context_inputs(layer: nn.Module, x: Tensor) -> ContextInputs:
    """Take the inputs that contexts give to a call of a layer.

    `MoELayer` calls it once in each call, with its tokens x [T, D] or [B, T, D]. The next call of
    the layer gets the next routes of a `replay`. Raises ValueError and EPStateError as described
    for `replay`.
    """
    # Contexts count if they were opened on this thread, in the same forward or backward pass.
    # Without any in a backward pass, a checkpoint is repeating a call: take that call's contexts.
    task = torch._C._current_graph_task_id()
    active = []
    for context in _contexts.get():
        if context.task == task and layer in context.layers:
            active.append(context)
    is_recompute = task != -1 and not active
    if is_recompute:
        active = [context for context in _contexts_of_former_call(layer) if layer in context.layers]

    # Of each kind, the innermost context counts. It comes last in `active`.
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
        _last_replay[layer] = weakref.ref(replay_context)
        # Find out from the gradient of x when the backward pass has come to this call.
        x = _with_gradient(layer, x)
        if x.requires_grad and not is_recompute:
            replay_context.await_gradient(x)

    adapter_ids = None
    if adapters_context is not None:
        adapter_ids = adapters_context.adapter_ids
    # If there is one number for each sequence, all tokens of the sequence have it.
    if adapter_ids is not None and x.dim() == 3 and adapter_ids.shape == x.shape[:1]:
        adapter_ids = adapter_ids[:, None].expand(x.shape[:2])
    return ContextInputs(x, routing, adapter_ids)


def _with_gradient(layer: nn.Module, x: Tensor) -> Tensor:
    """Let x require grad if the call will have a backward pass.

    If all layers before this one are frozen, no other code needs the gradient of x. But a hook of
    this gradient is how a `replay` learns that the backward pass has come to this call. When a
    checkpoint repeats the call, x has to require grad again: torch checks that the second call
    saves as many tensors as the first.
    """
    if x.requires_grad or not torch.is_grad_enabled():
        return x
    if not any(parameter.requires_grad for parameter in layer.parameters()):
        return x
    return x.detach().requires_grad_()


def _contexts_of_former_call(layer: nn.Module) -> tuple[_Context, ...]:
    """Find the contexts of the call of `layer` that a checkpoint is repeating, innermost last.

    Raises EPStateError if they cannot be found although the call may have had a `replay`.
    """
    # If the running node has read a tensor that was saved in a context, `unpack` has put this
    # context into the metadata of the node.
    node = torch._C._current_autograd_node()
    if node is not None:
        reference = node.metadata.get(_KEY)  # type: ignore[attr-defined]
        context: _Context | None = None if reference is None else reference()
        if context is not None:
            return (*context.outer, context)
    # Otherwise the call had no context. That is only certain if no call of the layer that had a
    # `replay` still waits for its backward pass.
    reference = _last_replay.get(layer)
    last = None if reference is None else reference()
    if last is not None and last.awaited:
        raise EPStateError(
            f"{_UNKNOWN}: other hooks of saved tensors, such as those that offload them, must be "
            "outside of `replay`, and the backward pass of a forward pass without `replay` must "
            "not come between that of one with it"
        )
    return ()


@contextmanager
def _within(context: _Context) -> Iterator[None]:
    """Let calls on this thread find `context` as the innermost one."""
    token = _contexts.set((*context.outer, context))
    try:
        yield
    finally:
        _contexts.reset(token)


def layers_of(model: nn.Module) -> dict[str, Any]:
    """The `MoELayer`s of a model, by their names without the parts that torch's wrappers add."""
    layers = {}
    for name, module in model.named_modules():
        if hasattr(module, "contexts"):
            layers[name_without_wrappers(name)] = module
    return layers


def name_without_wrappers(name: str) -> str:
    """The name of a module or a tensor without the parts that torch's wrappers have added.

    These wrappers are torch.compile, DDP, FSDP and `checkpoint_wrapper`.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _count(layers: Iterable[Any], by: int) -> None:
    """Add `by` to the number of contexts that each layer has."""
    with _counting:
        for layer in layers:
            layer.contexts += by


def _record_of(name: str, value: Any, layer: Any) -> Record:
    """Make the record of the layer called `name` from its value in `routes`, and check it.

    A list has an entry for each call. Any other value is one entry for all calls.
    """
    if isinstance(value, list):
        return _OneEntryPerCall([_routing_of(name, entry, layer) for entry in value])
    return _SameForAllCalls(_routing_of(name, value, layer))


def _routing_of(name: str, value: Any, layer: Any) -> Routing:
    """Check one entry of `routes` and return its ids and weights, flattened to [T, K].

    Weights are None if the entry has ids only. Raises TypeError or ValueError for other entries.
    """
    # A tuple may be a pair, or `Routes`, whose first two fields are ids and weights.
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
