"""Checks the arguments that users pass.

The errors say what an argument must be and what it is, such as "`x` must be bfloat16 [T, 7168], got
float32 [128, 4096]".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64)
FP8 = torch.float8_e4m3fn
FP32 = torch.finfo(torch.float32)
MXFP4 = torch.float4_e2m1fn_x2
"""The dtype of weights in MXFP4 and NVFP4. A byte holds two numbers in e2m1, of which the low four
bits are the first.
"""


def describe(value: object) -> str:
    """Describe a value for an error: a tensor by dtype and shape, any other value by its type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{dtype_name(value.dtype)} {list(value.shape)}"


def describe_fields(owner: object, fields: Mapping[str, object], *before: str) -> str:
    """Make one line for `repr` of `owner`: the texts `before`, then each field with its value.

    A tensor is described by its dtype and shape, since its values would have to be fetched from the
    device.
    """
    words = []
    for name, value in fields.items():
        text = describe(value) if isinstance(value, Tensor) else value
        words.append(f"{name} {text}")
    return f"{type(owner).__name__}({', '.join([*before, *words])})"


def check_tensor(
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | str],
    device: torch.device | None = None,
) -> None:
    """Check that a value is a tensor of one of `dtypes` and of `shape`. A letter in `shape` stands
    for any size.

    Raises TypeError for another type or dtype, and ValueError for another shape or device.
    """
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        raise TypeError(_must_be(name, dtypes, shape, value))
    if not _has_shape(value, shape):
        raise ValueError(_must_be(name, dtypes, shape, value))
    if device is not None and value.device != device:
        raise ValueError(f"`{name}` must be on {device}, got {value.device}")


def _has_shape(value: Tensor, shape: Sequence[int | str]) -> bool:
    """Whether a tensor has the shape `shape`, in which a letter stands for any size."""
    if len(value.shape) != len(shape):
        return False
    for size, wanted in zip(value.shape, shape, strict=True):
        if not isinstance(wanted, str) and size != wanted:
            return False
    return True


def check_number(name: str, value: float) -> None:
    """Raise ValueError for a number that fp32 cannot hold, since kernels take it in fp32.

    Numbers that are too large are refused, and so are those so close to 0 that fp32 loses bits.
    """
    if value and not FP32.tiny <= abs(value) <= FP32.max:
        raise ValueError(f"`{name}` must be a number that fp32 holds, got {value}")


def _must_be(
    name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int | str], value: object
) -> str:
    """The text of an error that says what a tensor must be, and what it is."""
    names = " or ".join(map(dtype_name, dtypes))
    sizes = ", ".join(map(str, shape))
    return f"`{name}` must be {names} [{sizes}], got {describe(value)}"


def wants_gradients(inputs: Iterable[Tensor]) -> bool:
    """Whether autograd needs a backward pass for what is computed from these inputs. Outside of
    grad mode it never does, and the inputs are not read.
    """
    return torch.is_grad_enabled() and any(value.requires_grad for value in inputs)


def refuse_tangents(*inputs: object) -> None:
    """Raise RuntimeError if forward-mode derivatives or a transform of torch.func are in use.

    Forward-mode derivatives through these inputs would silently be 0. The tensors of a transform of
    torch.func are valid only until the transform ends, while a round may keep them longer.
    """
    is_refused = False
    if (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is not None
    ):
        is_refused = True
    elif forward_ad._current_level >= 0:
        for value in inputs:
            if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
                is_refused = True
    if is_refused:
        raise RuntimeError(
            "epmoe has no forward-mode derivatives, and runs under no transform of torch.func: use "
            "backward() or torch.autograd.grad"
        )


def check_forward_only(*inputs: Tensor) -> None:
    """Raise RuntimeError if autograd would need a backward pass, since these calls have none."""
    if wants_gradients(inputs):
        raise RuntimeError(
            "epmoe is forward only, but an input requires grad: run under torch.inference_mode() "
            "or torch.no_grad()"
        )


def contiguous_rows(x: Tensor) -> Tensor:
    """Return `x` itself if each of its rows is contiguous, otherwise a copy. Rows may be any
    distance apart.
    """
    if x.stride()[-1] == 1 or x.shape[-1] <= 1:
        return x
    # `contiguous` may return `x` itself, so it does not serve here.
    return x.clone(memory_format=torch.contiguous_format)


def aligned_rows(x: Tensor) -> Tensor:
    """Return `x` itself if each of its rows is contiguous and starts at a multiple of 16 bytes,
    otherwise a copy.
    """
    stride, element = x.stride()
    if x.data_ptr() % 16 or stride * x.itemsize % 16 or element != 1:
        # `contiguous` may return `x` itself, so it does not serve here.
        return x.clone(memory_format=torch.contiguous_format)
    return x


def token_count(
    num_tokens: int | Tensor | None, num_rows: int, device: torch.device
) -> tuple[Tensor | None, int]:
    """Convert the argument `num_tokens` to the two arguments that operators take in its place.

    Returns a scalar tensor and the number of all rows if `num_tokens` is a tensor. Otherwise
    returns None and `num_tokens`, by default the number of all rows.

    Raises TypeError for anything but an int or an int32 tensor of one element, and ValueError for
    another device.
    """
    if isinstance(num_tokens, Tensor):
        check_tensor("num_tokens", num_tokens.reshape(-1), (torch.int32,), (1,), device)
        return num_tokens, num_rows
    if num_tokens is None:
        return None, num_rows
    # A bool is an int in Python, but no number of tokens.
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int | torch.SymInt):
        raise TypeError(
            f"`num_tokens` must be an int or an int32 scalar tensor, got {describe(num_tokens)}"
        )
    return None, num_tokens


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")
