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
    "so they do within torch.utils.checkpoint, which runs them again; "
    "a layer runs between graphs, too, within contexts such as `replay`: a graph would keep what "
    "they give"
)
def between_graphs(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return call(*arguments, **options)


@torch.compiler.assume_constant_result
def is_in_checkpoint() -> bool:
    """Whether dynamo traces what `torch.utils.checkpoint` runs, into the graph of its caller. Runs
    while dynamo traces.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._higher_order_ops.wrap import TagActivationCheckpoint

    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    while tracer is not None:
        if isinstance(tracer.source_target, TagActivationCheckpoint):
            return True
        tracer = tracer.parent
    return False
