"""Operators that torch.compile sees by name, and that cost an eager call almost nothing.

A call of an operator of `torch.library.custom_op` costs the host 20 to 100 µs, most of it in
wrappers of Python. Only some callers need a named operator: a compiler, a mode such as that of
selective checkpoints, a transform of torch.func, a subclass of Tensor. For all other callers an
operator of this module calls its function directly, and has its gradients by one
`torch.autograd.Function`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_PLAIN = frozenset({Tensor, nn.Parameter, int, bool, float, str, list, NoneType})
"""Types of arguments that do not intercept operators, as a subclass of Tensor may."""


class Operator:
    """An operator that `named` has made. Call it with the arguments of its function."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.direct = function
        """The function itself. Code within another operator calls it, since nothing intercepts
        operators there.
        """
        self._custom = torch.library.custom_op(name, function, mutates_args=())
        namespace, short_name = name.split("::")
        self._overload = getattr(getattr(torch.ops, namespace), short_name).default
        self._differentiable: type[torch.autograd.Function] | None = None
        parameters = inspect.signature(function).parameters.values()
        self._defaults = {
            each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY
        }

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Register the fake, as `CustomOpDef.register_fake` does."""
        return self._custom.register_fake(fake)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., Any] | None = None
    ) -> None:
        """Register the gradients, as `CustomOpDef.register_autograd` does.

        Without `setup_context` the operator has no gradients, and `backward` raises the error that
        says so.
        """
        self._custom.register_autograd(backward, setup_context=setup_context)
        if setup_context is not None:
            takes_options = bool(self._defaults)
            self._differentiable = _function_of(self.direct, backward, setup_context, takes_options)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or is_looked_at(arguments):
            return self._overload(*arguments, **options)
        if not (torch.is_grad_enabled() and _any_requires_grad(arguments)):
            return self.direct(*arguments, **options)
        # If no gradients were registered, the overload raises the error.
        if self._differentiable is None:
            return self._overload(*arguments, **options)
        return self._differentiable.apply(*arguments, self._defaults | options)


def named(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """A decorator that makes an `Operator` of a function, in place of
    `torch.library.custom_op(name, mutates_args=())`. The function changes no argument, and returns
    new memory.
    """
    return lambda function: Operator(name, function)


def is_looked_at(arguments: tuple[Any, ...]) -> bool:
    """Whether a mode, a transform or a subclass of Tensor intercepts operators, and so needs their
    names.
    """
    if torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0:
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return any(type(each) not in _PLAIN and isinstance(each, Tensor) for each in arguments)


def _any_requires_grad(arguments: tuple[Any, ...]) -> bool:
    """Whether any argument is a tensor that requires a gradient."""
    return any(isinstance(each, Tensor) and each.requires_grad for each in arguments)


def _function_of(
    function: Callable[..., Any],
    gradients: Callable[..., Any],
    setup_context: Callable[..., Any],
    takes_options: bool,
) -> type[torch.autograd.Function]:
    """Make an autograd.Function of a function and its gradients.

    `apply` of the result takes the positional arguments of the function and, last, a dict with its
    keyword arguments (`options`). `takes_options` says whether the function has keyword arguments.
    """

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            *inputs, options = arguments
            output = function(*inputs, **options)
            # torch passes `keyword_only_inputs` only for operators that have such arguments.
            by_name = {"keyword_only_inputs": options} if takes_options else {}
            setup_context(ctx, inputs=tuple(inputs), output=output, **by_name)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            grad_inputs = gradients(ctx, *grads)
            if not isinstance(grad_inputs, tuple):
                grad_inputs = (grad_inputs,)
            # The options, which are the last argument, have no gradient.
            return *grad_inputs, None

    Direct.__name__ = Direct.__qualname__ = function.__name__
    return Direct
