"""Calls that run between two graphs of torch.compile, as ordinary Python.

Only code that dynamo traces imports this file, because the import of dynamo takes a second or two.
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
    "so they do within torch.utils.checkpoint, which runs them again; "
    "a layer runs between graphs, too, within contexts such as `replay`: a graph would keep what "
    "they give"
)
def between_graphs(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call `call` with these arguments. dynamo ends its graph before the call and begins another
    one behind it.
    """
    return call(*arguments, **options)


@torch.compiler.assume_constant_result
def is_in_checkpoint() -> bool:
    """Whether dynamo is tracing a function that `torch.utils.checkpoint` runs.

    dynamo traces such a function into the graph of its caller. dynamo calls this function while it
    traces, and takes the result as a constant of the graph.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._higher_order_ops.wrap import TagActivationCheckpoint

    # Each function that is traced into a graph has a tracer, whose parent is that of its caller.
    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    while tracer is not None:
        if isinstance(tracer.source_target, TagActivationCheckpoint):
            return True
        tracer = tracer.parent
    return False
