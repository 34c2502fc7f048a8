"""Keeps the order of rounds in graphs of inductor, the compiler behind torch.compile. torch 2.13
loses this order.

Operators with effects must run in the order of the program. When inductor lowers such an operator,
it notes which operator must run before it. It stores this note under the name of a buffer, but its
scheduler looks for the note under the name of an operation, and does not find it. So the scheduler
may move a round over another one whose results it does not use.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch.utils._pytree as pytree
from torch._library.effects import EffectType
from torch._ops import OpOverload


def keep_order(*operators: OpOverload) -> None:
    """Make inductor run these operators in the order of the program, in all graphs that it makes
    from now on.

    A program that has not imported inductor does not compile with it, and the import takes a
    second. So this function does nothing unless inductor has been imported.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is not None:
        for operator in operators:
            lowering.lowerings.setdefault(operator, partial(_lowered, operator))


def _lowered(operator: OpOverload, *arguments: Any, **options: Any) -> Any:
    """Lower an operator as torch does, and note that it runs after the operator with effects before
    it. Inductor calls this in place of its own lowering.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    # Lower the operator as torch does. This makes it the graph's latest operator with effects, so
    # the one before must be read first.
    graph = V.graph
    before = graph.effectful_ops.get(EffectType.ORDERED)
    num_operations = len(graph.operations)
    made = ir.FallbackKernel.create(operator, *arguments, **options)

    # Let each new operation run after that one, under the name that the scheduler looks for.
    if before is not None:
        for operation in graph.operations[num_operations:]:
            graph.additional_star_deps[operation.get_operation_name()].add(before.get_name())
    return pytree.tree_map_only(ir.IRNode, ir.TensorBox.create, made)
