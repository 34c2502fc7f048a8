"""A trained model becomes a folder of Hugging Face, which transformers loads with the same bits."""

from __future__ import annotations

import copy
import errno
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from helpers import tiny_model
from launched import ROOT
from mxfp4_models import quantize
from safetensors.torch import load_file, save_file
from test_checkpoint_folders import died, fork_and_die
from test_nvfp4 import decoded
from transformers import AutoModelForCausalLM

import epmoe

FORMATS = [
    *("qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("mixtral", "granitemoe", "ernie4_5_moe", "llama4_text")
    ),
]


class Block(nn.Module):
    """As gpt-oss's block is called."""

    def __init__(self, layer: epmoe.MoELayer):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.layer(x), None


class GatedExpert(nn.Module):
    """A shared expert with the gate that Qwen2's blocks have, [1, D]."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.shared_expert = block.shared_expert
        self.shared_expert_gate = block.shared_expert_gate

    def forward(self, x: Tensor) -> Tensor:
        return self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)


def tiny(model_type: str, path: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model, and its folder, with a tokenizer."""
    # A block without experts, too.
    model = tiny_model(model_type, path, dtype, first_k_dense_replace=1)
    (path / "tokenizer.json").write_text("{}")
    return model


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, epmoe.SafetensorsFolder]:
    """A model with shared experts, and its folder, which no test changes."""
    path = tmp_path_factory.mktemp("deepseek")
    return tiny("deepseek_v3", path), epmoe.SafetensorsFolder(path)


def spread(
    model: nn.Module, ep: epmoe.ExpertParallel, folder: epmoe.SafetensorsFolder, **options: object
) -> nn.Module:
    """The model with layers in place of its blocks."""
    model = copy.deepcopy(model)
    for name, block in list(model.named_modules()):
        if hasattr(block, "experts") and (hasattr(block, "gate") or hasattr(block, "router")):
            shared = getattr(block, "shared_experts", getattr(block, "shared_expert", None))
            shared = GatedExpert(block) if hasattr(block, "shared_expert_gate") else shared
            layer = epmoe.MoELayer.from_safetensors(ep, folder, name, shared=shared, **options)
            model.set_submodule(
                name, Block(layer) if type(block).__name__ == "GptOssMLP" else layer
            )
    return model


def train(model: nn.Module) -> nn.Module:
    """Changes every parameter in the same way, whatever holds it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # not a bias of the choice, which is a buffer of a layer
                parameter.mul_(1.37)
    return model


def config_of(path: Path, dtype: str = "float32") -> epmoe.EPConfig:
    return epmoe.EPConfig.from_hf(
        path, ep_size=1, model={"dtype": dtype}, capacity={"max_num_tokens_per_rank": 16}
    )


@pytest.fixture
def trained(deepseek) -> Iterator[nn.Module]:
    """The model of `deepseek`, with layers in place of its blocks."""
    model, folder = deepseek
    with epmoe.ExpertParallel(config_of(folder.path), device="cpu") as ep:
        yield spread(model, ep, folder)


def assert_same_bits(got: nn.Module, want: nn.Module) -> None:
    got_state = got.state_dict()
    want_state = want.state_dict()
    assert got_state.keys() == want_state.keys()
    for name, tensor in want_state.items():
        assert got_state[name].dtype == tensor.dtype and torch.equal(got_state[name], tensor), name


@pytest.mark.parametrize("model_type", FORMATS)
def test_transformers_loads_what_was_trained(model_type, tmp_path):
    model = tiny(model_type, tmp_path / "start")
    folder = epmoe.SafetensorsFolder(tmp_path / "start")
    with epmoe.ExpertParallel(config_of(folder.path), device="cpu") as ep:
        trained = train(spread(model, ep, folder))
        epmoe.checkpoint.save_pretrained(trained, tmp_path / "end", folder, max_shard_bytes=100_000)
    # The folder is whole, in several files,
    files = {file.name for file in (tmp_path / "end").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= files and len(
        files
    ) > 5
    assert {file.name for file in tmp_path.iterdir()} == {"start", "end"}
    # and transformers has the trained model.
    assert_same_bits(AutoModelForCausalLM.from_pretrained(tmp_path / "end"), train(model))
    same = epmoe.SafetensorsFolder(tmp_path / "end")
    assert same.keys() == folder.keys()
    assert all(
        same[name].is_contiguous() and same[name].shape == folder[name].shape for name in folder
    )


def test_the_page_shows_it(tmp_path, monkeypatch):
    model = tiny("qwen3_moe", tmp_path / "start")
    folder = epmoe.SafetensorsFolder(tmp_path / "start")
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    code = page.split("tests/test_pretrained.py::test_the_page_shows_it -->\n```python\n")[1].split(
        "```"
    )[0]
    # The code of the page, before and behind the training.
    load, save = code.split("...\n")
    monkeypatch.chdir(tmp_path)
    with epmoe.ExpertParallel(config_of(folder.path), device="cpu") as ep:
        block = "model.layers.1.mlp"
        names = {
            "epmoe": epmoe,
            "torch": torch,
            "ep": ep,
            "folder": folder,
            "block": block,
            "model": model,
        }
        # One layer as the page has it, and one beside it.
        exec(load, names)
        train(model)
        trained = copy.deepcopy(model)
        train(names["layer"])
        model.set_submodule(block, names["layer"])
        other = model.model.layers[0]
        other.mlp = train(epmoe.MoELayer.from_safetensors(ep, folder, "model.layers.0.mlp"))
        exec(save, names)
    assert_same_bits(AutoModelForCausalLM.from_pretrained(tmp_path / "trained"), trained)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_mxfp4_trains_and_is_saved_without_scales(dtype, tmp_path):
    start = tmp_path / "start"
    tiny("gpt_oss", start, torch.bfloat16)
    quantize(start)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=dtype)  # which dequantizes
    folder = epmoe.SafetensorsFolder(start)
    name = str(dtype).removeprefix("torch.")
    with epmoe.ExpertParallel(config_of(start, name), device="cpu") as ep:
        # It has gradients, and is saved.
        trained = spread(model, ep, folder, dtype=dtype, router_dtype=dtype)
        layer = trained.model.layers[1].mlp.layer
        y = layer(torch.ones(3, 64, dtype=dtype))
        y.sum().backward()
        assert layer.experts.w_down.grad.any() and layer.router_weight.grad.any()
        epmoe.checkpoint.save_pretrained(train(trained), tmp_path / "end", start)
    # No scales are left.
    config = json.loads((tmp_path / "end" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == name
    assert_same_bits(AutoModelForCausalLM.from_pretrained(tmp_path / "end"), train(model))


def in_nvfp4(path: Path) -> dict[str, Tensor]:
    """Turn the experts of a folder into NVFP4 of modelopt. Returns their values, by their names."""
    tensors = load_file(path / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    values = {}
    for name in [name for name in tensors if re.search(r"experts\.\d", name)]:
        n, k = tensors.pop(name).shape
        codes = torch.randint(256, (n, k // 2), generator=draw, dtype=torch.uint8)
        scales = torch.randint(80, 96, (n, k // 16), generator=draw, dtype=torch.uint8)
        scale = torch.rand((), generator=draw) / 100
        values[name] = decoded(codes, scales, scale.item()).float()
        tensors |= {
            name: codes,
            f"{name}_scale": scales.view(torch.float8_e4m3fn),
            f"{name}_scale_2": scale,
            f"{name.removesuffix('weight')}input_scale": torch.tensor(0.5),
        }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "hf_quant_config.json").write_text("{}")
    return values


def test_nvfp4_trains_and_is_saved_without_scales(tmp_path):
    start = tmp_path / "start"
    model = tiny("qwen3_moe", start)
    values = in_nvfp4(start)
    model.load_state_dict(values, strict=False)
    folder = epmoe.SafetensorsFolder(start)
    with epmoe.ExpertParallel(config_of(start), device="cpu") as ep:
        trained = train(spread(model, ep, folder, dtype=torch.float32))
        epmoe.checkpoint.save_pretrained(trained, tmp_path / "end", start)
    assert not (tmp_path / "end" / "hf_quant_config.json").exists()
    end = epmoe.SafetensorsFolder(tmp_path / "end")
    assert not [name for name in end if "scale" in name]
    for name, value in values.items():
        assert torch.equal(end[name], value * 1.37)


def test_a_folder_with_all_experts_in_one_nvfp4_tensor_is_no_pattern(tmp_path):
    """Whether its copy would be transposed depends on the model."""
    start = tmp_path / "start"
    model = tiny("gpt_oss", start)
    tensors = load_file(start / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        E, k, n = tensors[name].shape
        tensors |= {
            name: torch.zeros(E, n, k // 2, dtype=torch.uint8),
            f"{name}_weight_scale": torch.ones(E, n, k // 16).to(torch.float8_e4m3fn),
            f"{name}_weight_scale_2": torch.ones(E),
        }
    save_file(tensors, start / "model.safetensors", metadata={"format": "pt"})
    folder = epmoe.SafetensorsFolder(start)
    with epmoe.ExpertParallel(config_of(start), device="cpu") as ep:
        trained = spread(model, ep, folder, dtype=torch.float32)
        with pytest.raises(ValueError, match="in NVFP4 as one tensor"):
            epmoe.checkpoint.save_pretrained(trained, tmp_path / "end", start)
    assert not (tmp_path / "end").exists()


def test_every_part_of_a_model_loses_its_quantization():
    """Also the parts that hold the experts in models of other authors."""
    says = {"quantization_config": {}, "torch_dtype": "float8_e4m3fn"}
    config = says | {"llm_config": dict(says), "thinker_config": {"text_config": dict(says)}}
    written = epmoe.checkpoint.pretrained.without_quantization(config, "bfloat16")
    part = {"torch_dtype": "bfloat16"}
    assert written == part | {"llm_config": part, "thinker_config": {"text_config": part}}


def narrow(experts: epmoe.GroupedExperts) -> None:
    experts.w_gate_up = nn.Parameter(experts.w_gate_up[:, :32].detach().clone())
    experts.w_down = nn.Parameter(experts.w_down[..., :16].detach().clone())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda model: setattr(model.model.layers[1].mlp, "shared", None),
            ValueError,
            "must have .*shared_experts.d",
        ),
        (
            lambda model: model.register_buffer("other", torch.ones(1)),
            ValueError,
            "has no tensor for `other`",
        ),
        (
            lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.ones(3))),
            ValueError,
            r"is \[64, 64\], b",
        ),
        (
            lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.ones(1, 64, 64))),
            ValueError,
            r"\[64, 64\]",
        ),
        (
            lambda model: narrow(model.model.layers[1].mlp.experts),
            ValueError,
            r"D and F: .*, 16\), got .*, 32\)",
        ),
        (
            lambda model: model.lm_head.to(torch.float8_e4m3fn),
            TypeError,
            "`lm_head.weight` must be dequantized",
        ),
    ],
)
def test_what_cannot_be_saved_is_named_and_leaves_nothing(
    change, error, message, deepseek, trained, tmp_path
):
    _, folder = deepseek
    change(trained)
    with pytest.raises(error, match=message):
        epmoe.checkpoint.save_pretrained(trained, tmp_path / "end", folder)
    assert not any(tmp_path.iterdir())


def test_a_write_that_fails_leaves_nothing(deepseek, trained, tmp_path, monkeypatch):
    _, folder = deepseek

    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", no_space)
    with pytest.raises(OSError, match="No space left"):
        epmoe.checkpoint.save_pretrained(trained, tmp_path / "end", folder)
    assert not any(tmp_path.iterdir())


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_folder_with_files_is_left_as_it_is(deepseek, trained):
    _, folder = deepseek
    before = files_of(folder.path)
    with pytest.raises(ValueError, match="must not exist, or be an empty folder"):
        epmoe.checkpoint.save_pretrained(trained, folder.path, folder)
    assert files_of(folder.path) == before


def test_a_death_at_any_write_leaves_no_folder_or_the_whole(deepseek, trained, tmp_path):
    _, folder = deepseek
    end = tmp_path / "end"

    def save() -> None:
        epmoe.checkpoint.save_pretrained(trained, end, folder, max_shard_bytes=100_000)

    save()  # imports what it needs
    want = files_of(end)
    # A save dies at its first change, its second one, and so on to its end.
    for number in itertools.count(1):
        if end.exists():
            shutil.rmtree(end)
        ended = not died(fork_and_die(save, number))
        if end.exists():
            assert files_of(end) == want
        if ended:
            break
    assert end.exists() and number > 20 and {file.name for file in tmp_path.iterdir()} == {"end"}
