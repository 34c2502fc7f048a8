"""Calls that run between the graphs of torch.compile. Imported by what dynamo traces: dynamo takes
a second or two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(
    reason="rounds with gradients run between graphs where num_rows is 'exact' or "
    "activation_memory_budget is below 1: "
    "compile without fullgraph, or give a number of rows and set "
    "torch._functorch.config.activation_memory_budget = 1; "
    "a layer runs between graphs, too, within contexts such as `replay`: a graph would keep what "
    "they give"
)
def between_graphs(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return call(*arguments, **options)
