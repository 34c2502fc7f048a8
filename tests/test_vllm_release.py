"""The plugin for vLLM in releases that it does not know: stubs of vLLM, each of another shape,
without vLLM.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from epmoe.config.config_file import ConfigError
from epmoe.integrations.vllm import register

LAYER = "vllm.model_executor.layers.fused_moe.routed_experts"


CONFIG: dict[str, Any] = {
    "parallel_config": SimpleNamespace(
        enable_eplb=False, use_ubatching=False, enable_elastic_ep=False
    ),
    "compilation_config": SimpleNamespace(
        cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True)
    ),
    "use_v2_model_runner": True,
}


def logger(name: str) -> logging.Logger:
    made = logging.getLogger(name)
    made.warning_once = made.warning
    return made


def moe_of(backend: str) -> Any:
    """vLLM's settings of a layer, with this `--all2all-backend`."""
    parallel = SimpleNamespace(use_all2all_kernels=True, all2all_backend=backend)
    sizes = {"num_local_experts": 4, "hidden_dim": 128, "in_dtype": torch.bfloat16}
    return SimpleNamespace(moe_parallel_config=parallel, is_lora_enabled=False, **sizes)


class Experts:
    """vLLM's layer of experts, as far as the plugin looks at it."""

    registered: type | None = None  # the first one

    @classmethod
    def register_oot(cls, replacement: type) -> None:
        Experts.registered = Experts.registered or replacement

    def _get_quant_method(self, *_: object) -> object:
        return self


class Vllm(MetaPathFinder, Loader):
    """Every module of a vLLM, with any name in it but those that are `gone`."""

    def __init__(self, version: str, gone: tuple[str, ...] = ()) -> None:
        self.version = version
        self.gone = gone
        self.replaced = dict[str, type]()
        self.chosen: dict[str, Any] = {}

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        ours = name.partition(".")[0] == "vllm" and name not in self.gone
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        stub = self
        name = spec.name
        known: dict[str, Any] = {
            "envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False),
            "__version__": self.version,
            "init_logger": logger,
            "op_registry_oot": self.replaced,
            "RoutedExperts": type("RoutedExperts", (Experts,), {}),
            "GptOssRoutedExperts": type("GptOssRoutedExperts", (Experts,), {}),
            "SleepModeBackendFactory": SimpleNamespace(register_backend=lambda *_: None),
            "WeightTransferEngineFactory": SimpleNamespace(register_engine=lambda *_: None),
            "get_current_vllm_config": lambda: SimpleNamespace(
                additional_config=self.chosen, **CONFIG
            ),
        }

        class Module(ModuleType):
            def __getattr__(self, attribute: str) -> Any:
                if (
                    f"{name}.{attribute}" in stub.gone
                    or attribute.startswith("__")
                    and attribute not in known
                ):
                    raise AttributeError(f"module {name} has no attribute {attribute}")
                return known.get(attribute, type(attribute, (), {}))

        return Module(name)

    def exec_module(self, module: ModuleType) -> None: ...


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Vllm]]:
    def forget() -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] == "vllm" or name.startswith("epmoe.integrations.vllm."):
                del sys.modules[name]

    def make(*arguments: Any) -> Vllm:
        stub = Vllm(*arguments)
        monkeypatch.setattr(sys, "meta_path", [stub, *sys.meta_path])
        return stub

    forget()
    monkeypatch.delenv("EPMOE_VLLM", raising=False)
    monkeypatch.setattr(Experts, "registered", None)
    yield make
    forget()


GONE = {
    "a factory in place of the layer": ("0.34.0", (LAYER,)),
    "a runner in place of the modular kernel": (
        "0.35.1",
        ("vllm.model_executor.layers.fused_moe.modular_kernel.FusedMoEKernel",),
    ),
    "another name of the interface of an exchange": (
        "0.36.0",
        ("vllm.model_executor.layers.fused_moe.modular_kernel.FusedMoEPrepareAndFinalizeModular",),
    ),
    "before the layer": ("0.25.0", (LAYER, "vllm.model_executor.custom_op")),
}


@pytest.mark.parametrize(("version", "gone"), GONE.values(), ids=GONE)
def test_a_release_of_another_shape(install, monkeypatch, caplog, version, gone):
    install(version, gone)
    register()
    assert (
        f"epmoe cannot be chosen: vLLM {version} has no layer of experts that epmoe knows"
        in caplog.text
    )
    assert Experts.registered is None
    monkeypatch.setenv("EPMOE_VLLM", "rank")
    with pytest.raises(
        RuntimeError, match=f"chooses epmoe, but vLLM {version} .* install vLLM 0.26 to 0.33"
    ):
        register()


@pytest.mark.parametrize("version", ["0.25.3", "0.34.0", "0.34.0rc1+cpu", "1.0.0"])
def test_a_release_of_the_same_shape_that_was_not_tried(install, version):
    """Nobody who has not chosen epmoe is disturbed."""
    stub = install(version)
    register()
    layer = Experts.registered()
    assert layer._get_quant_method("layers.0", None, None) is layer
    stub.chosen = {"epmoe": "rank"}
    with pytest.raises(
        ConfigError, match=re.escape(f"tried with vLLM 0.26 to 0.33, and this is {version}")
    ):
        layer._get_quant_method("layers.0", None, None)


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33.1"])
def test_a_release_that_was_tried(install, caplog, version):
    from_registry = install(version).replaced
    register()
    assert Experts.registered.__name__ == "EpmoeRoutedExperts" and not caplog.text
    assert sys.modules["epmoe.integrations.vllm.release"].problem() is None
    from_registry["RoutedExperts"] = Experts
    register()
    assert "another plugin has replaced RoutedExperts by Experts" in caplog.text


@pytest.mark.parametrize("backend", ["flashinfer_nvlink_one_sided", "of_another_plugin"])
def test_another_exchange_than_the_default_serves(install, caplog, backend):
    """A default that depends on the GPU, or a registry's name: vLLM's method stays as it is, and a
    warning says why.
    """
    install("0.33.0").chosen = {"epmoe": "rank"}
    register()
    layer = Experts.registered()
    assert layer._get_quant_method("layers.0", None, moe_of(backend)) is layer
    assert (
        f"not used, since --all2all-backend is {backend}, not allgather_reducescatter: vLLM's own"
        in caplog.text
    )


@pytest.mark.parametrize("runner", ["V2", "V1"])
def test_experts_that_move_under_either_model_runner(install, caplog, monkeypatch, runner):
    """V2 replays steps without a forward context, so a warning says in which steps experts move."""
    monkeypatch.setitem(CONFIG, "use_v2_model_runner", runner == "V2")
    install("0.33.0").chosen = {"epmoe": {"layout": "layer", "live": {"slots_per_rank": 4}}}
    register()
    method = Experts.registered()._get_quant_method(
        "layers.0", None, moe_of("allgather_reducescatter")
    )
    assert method.epmoe_choice.live == {"slots_per_rank": 4}
    assert ("epmoe moves experts only in steps with a prefill: model runner V2" in caplog.text) == (
        runner == "V2"
    )
