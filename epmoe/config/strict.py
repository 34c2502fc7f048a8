"""The base class of all pydantic models whose values users write in files."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from epmoe.native.arguments import FP32


def _in_fp32(value: float) -> float:
    """Return the value, or raise the error of pydantic if fp32 cannot hold it."""
    if value and not FP32.tiny <= abs(value) <= FP32.max:
        raise PydanticCustomError(
            "fp32",
            "Input should be 0 or a number that fp32 holds, from 1.2e-38 to 3.4e38",
        )
    return value


Float32 = Annotated[float, AfterValidator(_in_fp32)]
"""A number that kernels take in fp32. A larger number would become infinite there, and a smaller
one 0.
"""


class Strict(BaseModel):
    """A frozen model that refuses unknown keys and does not convert types."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
