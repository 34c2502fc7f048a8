"""The order of rounds in graphs of inductor, which torch 2.13 loses.

Its lowering of operators with effects notes what they follow under names of buffers, and its
scheduler looks under names of operations. A round then moves over one that it does not need.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch.utils._pytree as pytree
from torch._library.effects import EffectType
from torch._ops import OpOverload


def keep_order(*operators: OpOverload) -> None:
    """Each of these operators with effects follows the one before it in all graphs that inductor
    makes from now on. Without inductor, whose import takes a second, it does nothing.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is not None:
        for operator in operators:
            lowering.lowerings.setdefault(operator, partial(_lowered, operator))


def _lowered(operator: OpOverload, *arguments: Any, **options: Any) -> Any:
    """Lower an operator as torch does, and let it follow the last operator with effects."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    # The lowering of torch itself, which replaces the last operator with effects by this one.
    graph = V.graph
    before = graph.effectful_ops.get(EffectType.ORDERED)
    number = len(graph.operations)
    made = ir.FallbackKernel.create(operator, *arguments, **options)

    # Each operation that it made follows the operator before, under the name the scheduler knows.
    if before is not None:
        for operation in graph.operations[number:]:
            graph.additional_star_deps[operation.get_operation_name()].add(before.get_name())
    return pytree.tree_map_only(ir.IRNode, ir.TensorBox.create, made)
