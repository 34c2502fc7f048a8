"""The checks of a call of dispatch. Calls with the `RoundTemplate` of an earlier one need only a
few of them.
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
from epmoe.exchange.handles import ExpertMajor, Received, RoundShape, RoundTemplate, Slabs
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
    """The kinds of calls that one exchange has taken so far, by the values that rounds of a
    template share.

    Every call asks `of`, which therefore reads no more attributes than it needs.
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
    ) -> None:
        # Templates are made of these.
        self._config = config
        self._device = device
        self._views = views
        self._rounds = ref(rounds)
        self._rank = rank
        self._sizes = sizes
        self._descriptors = descriptors
        self._always_aligned = config.capacity.alignment is not None
        # Tags are numbers of layers where experts of layers move.
        self._first_tag = 0
        self._last_tag = constant("kMaxTag")
        if config.placement.live:
            self._first_tag = 1
            self._last_tag = config.placement.layers
        # `of` compares calls with these.
        self._payload = WIRE_FORMATS[config.exchange.payload]
        self._element = self._payload.element
        self._block = self._payload.block
        self._max_tokens = config.capacity.max_num_tokens_per_rank
        self._templates: dict[tuple[object, ...], RoundTemplate] = {}
        # Raises EPStateError while no round may begin. So there are no templates by then, and calls
        # of a known kind do not ask.
        self.check_weights: Callable[[], object] = lambda: None

    def of(self, call: Call) -> tuple[RoundTemplate, int]:
        """Find the template of a call, and T. Raises as `ExpertParallel.dispatch`, except for its
        token counts.
        """
        # Taken apart at once, which costs the host less than reading ten attributes.
        x, ids, weights, scales, _, layout, weight_rows, tag, aligned, extra = call
        if tag.__class__ is not int or not self._first_tag <= tag <= self._last_tag:
            _refuse_tag(tag, self._first_tag, self._last_tag)
        try:
            T, D = x.shape
            ids_shape = ids.shape
            rows, K = ids_shape
            device = self._device

            # What travels behind each row: its kind is a part of the shape of a round.
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

            # The fields of `RoundShape`, in its order.
            dtype = x.dtype
            key = (D, K, dtype, ids.dtype, weights.dtype, layout, weight_rows, aligned, kind)
            template = self._templates.get(key)

            # A call like an earlier one differs from it in these only.
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
            # Not even tensors of two dimensions: `_check` raises.
            pass

        # The first call of a shape, or one that does not fit.
        self.check_weights()
        _check(self._config, self._device, call)
        template = self._new(RoundShape(*key))
        self._templates[key] = template
        return template, T

    def no_tokens(self, shape: RoundShape, tag: int) -> Call:
        """Make a call without tokens, for a round of this shape."""
        D = shape.hidden_size
        payload = self._payload
        extra = shape.extra
        x = torch.empty(0, D, dtype=shape.dtype, device=self._device)
        # Rows that are quantized already come with scales.
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

    def with_extra(self, call: Call, kind: Extra) -> Call:
        """The call with longer rows, behind whose elements their `extra` lies."""
        given = call.extra
        if given is None:
            given = call.x.new_empty(len(call.x), *kind.shape, dtype=kind.dtype)
        x, scales = kind.behind(call.x, call.scales, given, self._payload)
        return call._replace(x=x, scales=scales, extra=kind)

    def _new(self, shape: RoundShape) -> RoundTemplate:
        """Make the template of rounds of this shape."""
        D = shape.hidden_size
        sizes = self._sizes
        aligned = shape.aligned or self._always_aligned

        # y has the dtype of x, or the config's where x is quantized already.
        y_dtype = shape.dtype
        if shape.dtype is self._payload.element:
            y_dtype = self._config.model.torch_dtype

        # The buffers in which rows arrive, by expert or by source.
        is_expert_major = shape.layout == "expert"
        expert_major = None
        slabs = None
        if is_expert_major:
            expert_major = self._expert_major(shape)
        else:
            slabs = self._slabs(shape)

        # What the operators take in place of these fields. Over several nodes the node has its own.
        descriptor = None
        if self._descriptors is not None:
            descriptor = self._descriptors.of(is_expert_major, shape.weight_rows, aligned)
        ranks_per_expert = self._config.topology.ep_size / self._config.num_physical_experts
        return RoundTemplate(
            shape,
            descriptor,
            layout=shape.layout,
            dtype=y_dtype,
            hidden_size=D,
            recv=Received(self._views["counts"], slabs),
            expert_major=expert_major,
            small_alignment_tokens=sizes["small_alignment_tokens"],
            small_alignment=sizes["small_alignment"] if aligned else 1,
            alignment=sizes["alignment"] if aligned else 1,
            rows_per_token=shape.top_k * ranks_per_expert,
            like=torch.empty(0, D, dtype=y_dtype, device=self._device),
            rounds=self._rounds,
            rank=self._rank,
        )

    def _expert_major(self, shape: RoundShape) -> ExpertMajor:
        """View the buffers as expert-major rows of rounds of this shape."""
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
            # Behind the scales of a row come those of its `extra`, which nobody reads.
            scales = rows_as(views["row_scales"], payload.scale, payload.num_scales(width))
            scales = scales[:, : payload.num_scales(D)]
        read_extra = None
        if shape.extra is not None and shape.extra != NOTHING:
            read_extra = partial(shape.extra.read, rows, items)
        return ExpertMajor(
            rows=rows[:, :items],
            scales=scales,
            expert_offsets=views["expert_offsets"],
            tokens_per_expert=views["tokens_per_expert"],
            read_extra=read_extra,
        )

    def _slabs(self, shape: RoundShape) -> Slabs:
        """View the buffers as rank-major rows of rounds of this shape."""
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
        """View a buffer as slabs [R, M, …]. A rank without experts has no such buffer in its
        window, since no row comes. Its first such call makes one, since callers expect slabs.
        """
        buffer = self._views[name]
        slabs = self._views["recv.ids"].shape[:2]
        if buffer.shape[:2] != slabs:
            # A later call outside of inference mode may write it.
            with torch.inference_mode(False):
                buffer = buffer.new_zeros(*slabs, *buffer.shape[2:])
            self._views[name] = buffer
        return buffer

    def _width(self, shape: RoundShape) -> int:
        """Elements of a row with its `extra`."""
        if shape.extra is None:
            return shape.hidden_size
        return shape.extra.width(shape.hidden_size, self._payload, shape.dtype)


def rows_as(buffer: Tensor, dtype: torch.dtype, length: int) -> Tensor:
    """An expert-major buffer as [N_cap, length] of `dtype`: contiguous, whatever D and dtype the
    plan has.
    """
    flat = buffer.flatten().view(torch.uint8).view(dtype)
    return flat.as_strided((buffer.shape[0], length), (length, 1))


def _slabs_as(buffer: Tensor, dtype: torch.dtype, length: int) -> Tensor:
    """A window buffer as [R, M, length] of `dtype`; its strides stay the plan's, whose rows may be
    longer.
    """
    return buffer.view(torch.uint8).view(dtype)[..., :length]


def _fits(scales: Tensor, payload: WireFormat, T: int, D: int, device: torch.device) -> bool:
    """Whether `scales` needs no copy and no error: as many as `payload` has, in contiguous rows."""
    if scales.shape != (T, payload.num_scales(D)):
        return False
    if scales.dtype is not payload.scale or scales.device != device:
        return False
    # A row of one block has one scale, whose stride says nothing.
    is_contiguous = scales.stride()[1] == 1 or payload.block >= D
    wants_grad = scales.requires_grad and torch.is_grad_enabled()
    return is_contiguous and not wants_grad


def _extra_fits(extra: Tensor, T: int, device: torch.device) -> bool:
    """Whether `extra`, of a kind that was checked, needs no error."""
    wants_grad = extra.requires_grad and torch.is_grad_enabled()
    return extra.shape[:1] == (T,) and extra.device == device and not wants_grad


def _refuse_tag(tag: object, first: int, last: int) -> NoReturn:
    if isinstance(tag, bool) or not isinstance(tag, int):
        raise TypeError(f"`tag` must be an int, got {describe(tag)}")
    why = ""
    if first:
        why = ", a layer of `placement.layers`"
    raise ValueError(f"`tag` must be from {first} to {last}{why}, got {tag}")


def _check(config: EPConfig, device: torch.device, call: Call) -> None:
    """Raise TypeError, ValueError or RuntimeError for a call that `Templates.of` cannot take, in
    the words of users.
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
    """Check the layout, and what goes with it."""
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
    """Check the dtype of x, which `scales` may change, then its D and T."""
    x = call.x
    D = config.model.hidden_size
    M = config.capacity.max_num_tokens_per_rank
    dtypes = _dtypes_of_x(config, call)
    check_tensor("x", x, dtypes, ("T", "D"), device)
    T, hidden = x.shape

    # Whole lines of 16 bytes. Where rows do not become longer, whole blocks of scales.
    payload = WIRE_FORMATS[config.exchange.payload]
    combine = WIRE_FORMATS[config.exchange.combine_payload]
    step = 16 // x.dtype.itemsize
    whole = "16 bytes"
    if payload.block:
        step = LINE_BYTES
        whole = f"lines of {LINE_BYTES} elements"
    several = config.topology.num_nodes > 1
    if combine.block or (payload.block and several):
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
    """The dtypes that x may have. Raises ValueError if there are scales for x and it needs none,
    or the other way round.
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
        # Rows reach nodes quantized, and return in the dtype of the config.
        return [dtype]
    # The config's dtype, and smaller ones, for which there is room.
    return [dtype, *(smaller for smaller in FLOATS if smaller.itemsize < dtype.itemsize)]


def _check_pairs(config: EPConfig, device: torch.device, call: Call) -> None:
    """Ids and weights, of an x that was checked."""
    ids = call.ids
    T = len(call.x)
    K = config.model.num_experts_per_tok
    check_tensor("ids", ids, INTS, (T, "K"), device)
    if not 1 <= ids.shape[1] <= K:
        raise ValueError(f"`ids` must be int32 or int64 [{T}, 1..{K}], got {describe(ids)}")
    check_tensor("weights", call.weights, FLOATS, tuple(ids.shape), device)
    check_forward_only(call.x, call.weights)


def _check_scales(config: EPConfig, device: torch.device, call: Call) -> None:
    """Check the scales of an x that was checked, if there are some."""
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
