"""epmoe's `GroupedExperts` in SGLang's place for a runner of experts, which
`register_moe_runner_core` is: SGLang asks for the core of "deep_gemm" where it makes a layer, and
hands it the rows of the dispatcher.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from epmoe.integrations.sglang.dispatcher import EpmoeDispatcher

try:
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig, register_moe_runner_core
    from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
    from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmRunnerCore
    from sglang.srt.layers.moe.token_dispatcher.base import CombineInput
    from sglang.srt.layers.moe.utils import MoeRunnerBackend, get_moe_a2a_backend
except ImportError as error:
    raise ImportError(
        "experts of epmoe in SGLang need SGLang 0.5.23, with its `register_moe_runner_core`: "
        f"{error}"
    ) from error

__all__ = ["EpmoeRunnerCore", "make_runner_core", "register_experts"]


@cache
def register_experts() -> None:
    """Have SGLang ask `make_runner_core` for the experts of each layer.

    Raises ValueError if another plugin has registered experts for this backend.
    """
    register_moe_runner_core(MoeRunnerBackend.DEEP_GEMM.value, make_runner_core)


def make_runner_core(config: MoeRunnerConfig) -> Any:
    """The experts of a layer: ours where the tokens travel by `deepep_v2`, whose place epmoe takes,
    and SGLang's own otherwise.
    """
    if get_moe_a2a_backend().is_deepep_v2():
        return EpmoeRunnerCore(config)
    return DeepGemmRunnerCore(config)


class EpmoeRunnerCore(DispatchMoeRunnerCore):
    """Runs `GroupedExperts` over the open round of the layer's dispatcher."""

    runner_backend = MoeRunnerBackend.DEEP_GEMM

    def run_from_dispatch(
        self,
        dispatch_output: Any,
        quant_info: Any,
        runner_config: MoeRunnerConfig,
        hooks: Any = None,
    ) -> CombineInput:
        """Run the experts over the rows that arrived. Returns outputs [n, D].

        Raises ValueError for LoRA, for a layer whose tokens epmoe does not carry, and for experts
        that `GroupedExperts` are not.
        """
        layer = runner_config.layer
        dispatcher = getattr(layer, "dispatcher", None)
        if not isinstance(dispatcher, EpmoeDispatcher):
            raise ValueError(
                "EPMOE_SGLANG=layer needs layers whose tokens epmoe carries, got the dispatcher "
                f"{type(dispatcher).__name__}: set EPMOE_SGLANG=1"
            )
        if hooks is not None:
            # SGLang's layers with LoRA call the dispatcher by themselves.
            dispatcher.abort()
            raise ValueError("EPMOE_SGLANG=layer takes no LoRA: set EPMOE_SGLANG=1")
        return dispatcher.compute(layer, dispatch_output)
