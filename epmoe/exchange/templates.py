"""Checks the calls of dispatch, and keeps a `RoundTemplate` for each shape of calls.

The first call of a shape is checked in full. Later calls of the same shape need only a few
comparisons.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NoReturn
from weakref import ref

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.exchange.call import Call
from epmoe.exchange.descriptors import Descriptors
from epmoe.exchange.extra import NOTHING, Extra, check_extra
from epmoe.exchange.handles import Missing, Received, RoundShape, RoundTemplate, Rows, Slabs
from epmoe.exchange.round_state import RoundState
from epmoe.native.arguments import (
    FLOATS,
    INTS,
    check_forward_only,
    check_tensor,
    describe,
    dtype_name,
    refuse_tangents,
)
from epmoe.native.formats import LINE_BYTES, WIRE_FORMATS, WireFormat
from epmoe.native.layouts import constant


class Templates:
    """The templates of the calls that one exchange has taken so far, by the shape of the call.

    Every round calls `of`, so this method reads no more attributes than it needs.

    Args:
        config: the config of the exchange.
        device: where the tensors of calls must be.
        views: the buffers of the exchange by name.
        rounds: the state of its rounds, of which a template keeps a weak reference.
        rank: this rank.
        sizes: the sizes of the memory plan.
        descriptors: makes the descriptors of rounds; None over several nodes.
        check_weights: raises EPStateError as long as ranks have different weights, so that no round
            may begin.
    """

    def __init__(
        self,
        config: EPConfig,
        device: torch.device,
        views: dict[str, Tensor],
        rounds: RoundState,
        rank: int,
        sizes: dict[str, int],
        descriptors: Descriptors | None,
        check_weights: Callable[[], object],
    ) -> None:
        # What `_new` needs to make a template.
        self._config = config
        self._device = device
        self._views = views
        self._rounds = ref(rounds)
        self._rank = rank
        self._sizes = sizes
        self._descriptors = descriptors
        self._always_aligned = config.capacity.alignment is not None
        # If experts move, a tag is the number of a layer, counted from 1. Otherwise any tag will
        # do.
        self._first_tag = 0
        self._last_tag = constant("kMaxTag")
        if config.placement.live:
            self._first_tag = 1
            self._last_tag = config.placement.layers
        self._check_weights = check_weights
        # What `of` compares calls with.
        self._payload = WIRE_FORMATS[config.exchange.payload]
        self._element = self._payload.element
        self._block = self._payload.block
        self._max_tokens = config.capacity.max_num_tokens_per_rank
        self._templates: dict[tuple[object, ...], RoundTemplate] = {}

    def of(self, call: Call) -> tuple[RoundTemplate, int]:
        """Check a call. Returns the template of its shape, and the number of its tokens.

        Raises the errors of `ExpertParallel.dispatch`, except for those of `num_tokens`.
        """
        # One assignment takes the call apart, since reading ten attributes costs the host more.
        x, ids, weights, scales, _, layout, weight_rows, tag, aligned, extra = call
        if tag.__class__ is not int or not self._first_tag <= tag <= self._last_tag:
            _refuse_tag(tag, self._first_tag, self._last_tag)
        try:
            T, D = x.shape
            ids_shape = ids.shape
            rows, K = ids_shape
            device = self._device

            # Find the dtype and shape of the extra bytes, which are a part of the round's shape.
            # Rows that the kernels fill up to whole blocks bring `NOTHING`.
            kind: Extra | None = None
            extra_fits = True
            if extra is not None:
                if isinstance(extra, Extra):
                    kind = extra
                else:
                    kind = Extra.of(extra)
                    extra_fits = _extra_fits(extra, T, device)
            elif self._block and D % self._block:
                kind = NOTHING

            # The key has the fields of `RoundShape` in their order.
            dtype = x.dtype
            key = (D, K, dtype, ids.dtype, weights.dtype, layout, weight_rows, aligned, kind)
            template = self._templates.get(key)

            # An earlier call of this shape has passed all checks. Compare what may be different
            # now.
            shapes_fit = rows == T <= self._max_tokens and weights.shape == ids_shape
            on_device = x.device == device and ids.device == device and weights.device == device
            wants_grad = torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
            scales_fit = (dtype is self._element) == (scales is not None)
            if scales is not None:
                scales_fit = scales_fit and _fits(scales, self._payload, T, D, device)
            call_fits = shapes_fit and on_device and scales_fit and extra_fits and not wants_grad
            if template is not None and call_fits:
                return template, T
        except (AttributeError, TypeError, ValueError):
            # The arguments are not even tensors of two dimensions: `_check` raises for them.
            pass

        # This is the first call of its shape, or an argument does not fit. `_check` raises for any
        # argument that is wrong. Behind it the key is complete, since a right call raises nothing
        # above. Whether the ranks have the same weights is asked here only, which is enough:
        # templates are made once rounds may begin.
        self._check_weights()
        _check(self._config, self._device, call)
        template = self._new(RoundShape(*key))
        self._templates[key] = template
        return template, T

    def no_tokens(self, shape: RoundShape, tag: int) -> Call:
        """Make a call without tokens. With it a rank takes part in a round of this shape."""
        D = shape.hidden_size
        payload = self._payload
        extra = shape.extra
        x = torch.empty(0, D, dtype=shape.dtype, device=self._device)
        # If the rows of the shape are quantized already, the call needs scales, too.
        no_scales = None
        if x.dtype is payload.element:
            no_scales = x.new_empty(0, payload.num_scales(D), dtype=payload.scale)
        no_extra = None
        if extra is not None and extra != NOTHING:
            no_extra = x.new_empty(0, *extra.shape, dtype=extra.dtype)
        return Call(
            x,
            ids=x.new_empty(0, shape.top_k, dtype=shape.ids_dtype),
            weights=x.new_empty(0, shape.top_k, dtype=shape.weights_dtype),
            scales=no_scales,
            layout=shape.layout,
            weight_rows=shape.weight_rows,
            tag=tag,
            aligned=shape.aligned,
            extra=no_extra,
        )

    def with_extra(self, call: Call, kind: Extra | None) -> Call:
        """Return the call with longer rows, which have their extra bytes behind the elements.

        `kind` is the dtype and shape of the extra bytes. The call brings some.
        """
        assert kind is not None and call.extra is not None
        x, scales = kind.behind(call.x, call.scales, call.extra, self._payload)
        return call._replace(x=x, scales=scales, extra=kind)

    def _new(self, shape: RoundShape) -> RoundTemplate:
        """Make the template of rounds of this shape."""
        D = shape.hidden_size
        sizes = self._sizes
        aligned = shape.aligned or self._always_aligned

        # y has the dtype of x, or that of the config if x is quantized already.
        y_dtype = shape.dtype
        if shape.dtype is self._payload.element:
            y_dtype = self._config.model.torch_dtype

        # The buffers in which rows arrive, by expert or by source.
        is_expert_major = shape.layout == "expert"
        rows: Rows | Missing = Missing("dispatched", "rank")
        slabs: Slabs | Missing = Missing("recv", "expert")
        if is_expert_major:
            rows = self._rows(shape)
        else:
            slabs = self._slabs(shape)

        # The descriptor tells the operators the shape. Over several nodes there is none here: the
        # exchange within the node has descriptors of its own.
        descriptor = None
        if self._descriptors is not None:
            descriptor = self._descriptors.of(is_expert_major, shape.weight_rows, aligned)
        ranks_per_expert = self._config.topology.ep_size / self._config.num_physical_experts
        return RoundTemplate(
            shape,
            descriptor,
            dtype=y_dtype,
            recv=Received(self._views["counts"], slabs),
            rows=rows,
            small_alignment_tokens=sizes["small_alignment_tokens"],
            small_alignment=sizes["small_alignment"] if aligned else 1,
            alignment=sizes["alignment"] if aligned else 1,
            rows_per_token=shape.top_k * ranks_per_expert,
            like=torch.empty(0, D, dtype=y_dtype, device=self._device),
            rounds=self._rounds,
            rank=self._rank,
        )

    def _rows(self, shape: RoundShape) -> Rows:
        """View the buffers as the expert-major rows of a round of this shape."""
        payload = self._payload
        views = self._views
        D = shape.hidden_size

        # Rows, behind whose elements their `extra` may lie.
        width = self._width(shape)
        items = payload.row_items(D, shape.dtype)
        dtype = payload.dtype_of(shape.dtype)
        rows = rows_as(views["rows"], dtype, payload.row_items(width, shape.dtype))
        scales = None
        if payload.scale:
            # The blocks of extra bytes have scales, too. Leave them out, since nobody reads them.
            scales = rows_as(views["row_scales"], payload.scale, payload.num_scales(width))
            scales = scales[:, : payload.num_scales(D)]
        read_extra = None
        if shape.extra is not None and shape.extra != NOTHING:
            read_extra = partial(shape.extra.read, rows, items)
        return Rows(
            rows=rows[:, :items],
            expert_offsets=views["expert_offsets"],
            tokens_per_expert=views["tokens_per_expert"],
            scales=scales,
            read_extra=read_extra,
        )

    def _slabs(self, shape: RoundShape) -> Slabs:
        """View the buffers as the rank-major rows of a round of this shape."""
        payload = self._payload
        views = self._views
        D = shape.hidden_size
        K = shape.top_k

        # Rows, behind whose elements their `extra` may lie.
        items = payload.row_items(D, shape.dtype)
        dtype = payload.dtype_of(shape.dtype)
        row_items = payload.row_items(self._width(shape), shape.dtype)
        x = _slabs_as(self._slabs_of("recv.x"), dtype, row_items)
        scales = None
        if payload.scale:
            buffer = self._slabs_of("recv.scales")
            scales = _slabs_as(buffer, payload.scale, payload.num_scales(D))
        read_extra = None
        if shape.extra is not None and shape.extra != NOTHING:
            read_extra = partial(shape.extra.read, x, items)
        return Slabs(
            x=x[..., :items],
            scales=scales,
            ids=_slabs_as(views["recv.ids"], torch.int32, K),
            weights=_slabs_as(views["recv.weights"], torch.float32, K),
            read_extra=read_extra,
        )

    def _slabs_of(self, name: str) -> Tensor:
        """View a buffer as slabs [ranks, slots of a rank, …].

        On a rank without experts the buffer is empty, since no rows arrive there. But callers
        expect slabs. So the first call makes a buffer of zeros, and puts it in place of the empty
        view.
        """
        buffer = self._views[name]
        slabs = self._views["recv.ids"].shape[:2]
        if buffer.shape[:2] != slabs:
            # It must not be an inference tensor: those cannot be written outside of inference mode.
            with torch.inference_mode(False):
                buffer = buffer.new_zeros(*slabs, *buffer.shape[2:])
            self._views[name] = buffer
        return buffer

    def _width(self, shape: RoundShape) -> int:
        """Elements of a row together with its extra bytes."""
        if shape.extra is None:
            return shape.hidden_size
        return shape.extra.width(shape.hidden_size, self._payload, shape.dtype)


def rows_as(buffer: Tensor, dtype: torch.dtype, length: int) -> Tensor:
    """View an expert-major buffer as contiguous rows [rows of the buffer, length] of `dtype`.

    The rows of the memory plan may be longer or have another dtype. Then the view uses only the
    beginning of the buffer.
    """
    flat = buffer.flatten().view(torch.uint8).view(dtype)
    return flat.as_strided((buffer.shape[0], length), (length, 1))


def _slabs_as(buffer: Tensor, dtype: torch.dtype, length: int) -> Tensor:
    """View a window buffer as [ranks, slots of a rank, length] of `dtype`.

    The view keeps the strides of the memory plan, whose rows may be longer.
    """
    return buffer.view(torch.uint8).view(dtype)[..., :length]


def _fits(scales: Tensor, payload: WireFormat, T: int, D: int, device: torch.device) -> bool:
    """Whether the scales of `T` rows of `D` elements can be used as they are.

    If not, `_check_scales` finds the error.
    """
    if scales.shape != (T, payload.num_scales(D)):
        return False
    if scales.dtype is not payload.scale or scales.device != device:
        return False
    # If a row has only one block, it has one scale, and the stride of a single element is
    # arbitrary.
    is_contiguous = scales.stride()[1] == 1 or payload.block >= D
    wants_grad = scales.requires_grad and torch.is_grad_enabled()
    return is_contiguous and not wants_grad


def _extra_fits(extra: Tensor, T: int, device: torch.device) -> bool:
    """Whether the extra bytes of `T` tokens can be used as they are. Their dtype and shape were
    checked in an earlier call.
    """
    wants_grad = extra.requires_grad and torch.is_grad_enabled()
    return extra.shape[:1] == (T,) and extra.device == device and not wants_grad


def _refuse_tag(tag: object, first: int, last: int) -> NoReturn:
    """Raise TypeError or ValueError for a tag that is no int from `first` to `last`."""
    if isinstance(tag, bool) or not isinstance(tag, int):
        raise TypeError(f"`tag` must be an int, got {describe(tag)}")
    why = ""
    if first:
        why = ", a layer of `placement.layers`"
    raise ValueError(f"`tag` must be from {first} to {last}{why}, got {tag}")


def _check(config: EPConfig, device: torch.device, call: Call) -> None:
    """Check all arguments of a call. Raises TypeError, ValueError or RuntimeError, with a text that
    tells the user what to change.
    """
    refuse_tangents()
    _check_flags(call)
    _check_x(config, device, call)
    _check_pairs(config, device, call)
    _check_scales(config, device, call)
    if call.extra is None:
        return
    if call.weight_rows:
        raise ValueError(
            "`extra` must be None with apply_router_weight_on_input, which multiplies whole rows "
            "by the weights"
        )
    if not isinstance(call.extra, Extra):
        check_extra(call.extra, len(call.x), device, config.capacity.extra_bytes)


def _check_flags(call: Call) -> None:
    """Check the layout, `apply_router_weight_on_input` and `aligned`."""
    layout = call.layout
    weight_rows = call.weight_rows
    aligned = call.aligned
    if layout not in ("expert", "rank"):
        raise ValueError(f"`layout` must be 'expert' or 'rank', got {layout!r}")
    if not isinstance(weight_rows, bool):
        raise TypeError(
            f"`apply_router_weight_on_input` must be a bool, got {describe(weight_rows)}"
        )
    if not isinstance(aligned, bool):
        raise TypeError(f"`aligned` must be a bool, got {describe(aligned)}")
    if weight_rows and layout == "rank":
        raise ValueError(
            "`apply_router_weight_on_input` needs expert-major rows: it must be False with "
            "layout='rank'"
        )


def _check_x(config: EPConfig, device: torch.device, call: Call) -> None:
    """Check the dtype of x, its hidden size and its number of tokens."""
    x = call.x
    D = config.model.hidden_size
    M = config.capacity.max_num_tokens_per_rank
    dtypes = _dtypes_of_x(config, call)
    check_tensor("x", x, dtypes, ("T", "D"), device)
    T, hidden = x.shape

    # The hidden size must be a multiple of `step` elements: a row has whole lines of 16 bytes. If
    # rows cannot be filled up, a row has whole blocks of scales.
    payload = WIRE_FORMATS[config.exchange.payload]
    combine = WIRE_FORMATS[config.exchange.combine_payload]
    step = 16 // x.dtype.itemsize
    whole = "16 bytes"
    if payload.block:
        step = LINE_BYTES
        whole = f"lines of {LINE_BYTES} elements"
    has_several_nodes = config.topology.num_nodes > 1
    if combine.block or (payload.block and has_several_nodes):
        step = max(payload.block, combine.block)
        whole = f"blocks of {step}"
    if hidden > D or hidden < 1 or hidden % step:
        raise ValueError(
            f"`x` must be {dtype_name(dtypes[0])} [T, {D}], or a smaller D of whole {whole}, got "
            f"{describe(x)}"
        )
    if T > M:
        raise ValueError(
            f"`x` has {T} tokens, but capacity.max_num_tokens_per_rank is {M}: set it to at least "
            f"{T} on all ranks"
        )


def _dtypes_of_x(config: EPConfig, call: Call) -> list[torch.dtype]:
    """The dtypes that x may have in this call.

    Raises ValueError if the call has scales for an x that needs none, or lacks scales for an x that
    needs them.
    """
    dtype = config.model.torch_dtype
    payload = WIRE_FORMATS[config.exchange.payload]
    element = payload.element
    scale = payload.scale
    if element is None or scale is None:
        if call.scales is not None:
            raise ValueError(
                "`scales` need an `exchange.payload` with scales, such as fp8: the format in which "
                "their rows travel"
            )
    elif call.scales is not None:
        return [element]
    elif getattr(call.x, "dtype", None) == element:
        what = f"{dtype_name(scale)} [T, D/{payload.block}] where `x` is {dtype_name(element)}"
        raise ValueError(f"`scales` must be {what}, got {describe(call.scales)}")
    elif config.topology.num_nodes > 1:
        # Over several nodes, rows travel quantized and return in the dtype of the config.
        return [dtype]
    # x may have the dtype of the config. A smaller dtype fits into the same buffers.
    return [dtype, *(smaller for smaller in FLOATS if smaller.itemsize < dtype.itemsize)]


def _check_pairs(config: EPConfig, device: torch.device, call: Call) -> None:
    """Check ids and weights. x was checked before."""
    ids = call.ids
    T = len(call.x)
    K = config.model.num_experts_per_tok
    check_tensor("ids", ids, INTS, (T, "K"), device)
    if not 1 <= ids.shape[1] <= K:
        raise ValueError(f"`ids` must be int32 or int64 [{T}, 1..{K}], got {describe(ids)}")
    check_tensor("weights", call.weights, FLOATS, tuple(ids.shape), device)
    check_forward_only(call.x, call.weights)


def _check_scales(config: EPConfig, device: torch.device, call: Call) -> None:
    """Check the scales, if the call has any. x was checked before."""
    scales = call.scales
    payload = WIRE_FORMATS[config.exchange.payload]
    if scales is None or payload.scale is None:
        return
    T, hidden = call.x.shape
    check_tensor("scales", scales, (payload.scale,), (T, payload.num_scales(hidden)), device)
    if scales.stride(1) != 1 and hidden > payload.block:
        raise ValueError(
            f"`scales` must have contiguous rows, got strides {scales.stride()}: use "
            "`.contiguous()`"
        )
    check_forward_only(scales)
