"""Experts and routers of Hugging Face checkpoints, of which a rank reads its own experts only."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from helpers import TINY_MODEL, alone, assert_close, randn, tiny_model
from torch import Tensor

pytest.importorskip("transformers")

from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import epmoe
from epmoe.checkpoint.safetensors_folder import INDEX, WHOLE
from epmoe.cli.demo.generate import saved_model
from epmoe.local.weight_formats import dequantize_weights

pytestmark = pytest.mark.usefixtures("serving")

E = 6
F = 128
D = 256
BLOCK = "model.layers.1.mlp"
FP8 = torch.float8_e4m3fn


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors, and of the experts of slices, that have been read since
    the test began.
    """
    names: list[str] = []

    class Opened:
        def __init__(self, *arguments: object, **options: object) -> None:
            self.file = safe_open(*arguments, **options)
            self.keys = self.file.keys

        def get_tensor(self, name: str) -> Tensor:
            names.append(name)
            return self.file.get_tensor(name)

        def get_slice(self, name: str) -> MagicMock:
            part = self.file.get_slice(name)
            recorded = MagicMock(wraps=part)
            recorded.__getitem__.side_effect = lambda x: names.append(f"{name}[{x}]") or part[x]
            return recorded

    monkeypatch.setattr("safetensors.safe_open", Opened)
    return names


def weights_of_experts(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"w_gate_up": randn(E, 2 * F, D).to(dtype), "w_down": randn(E, D, F, seed=1).to(dtype)}


def of_each_expert(
    weights: dict[str, Tensor], block: str, names: tuple[str, str, str]
) -> dict[str, Tensor]:
    """The tensors of a checkpoint that has gate, up and down of each expert."""
    tensors = {f"{block}.gate.weight": randn(E, D, seed=2)}
    for x in range(E):
        for name, weight in zip(
            names, (*weights["w_gate_up"][x].chunk(2), weights["w_down"][x]), strict=True
        ):
            tensors[f"{block}.experts.{x}.{name}.weight"] = weight.clone()
    return tensors


def saved(path: Path, tensors: dict[str, Tensor]) -> epmoe.SafetensorsFolder:
    """The folder, of one file."""
    save_file(tensors, path / "model.safetensors")
    return epmoe.SafetensorsFolder(path)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], logical: list[int]) -> None:
    assert got.keys() == want.keys()
    for name, weight in want.items():
        assert got[name].dtype == weight.dtype and torch.equal(
            got[name].float(), weight[logical].float()
        ), name


@pytest.mark.parametrize(
    ("block", "names"),
    [
        ("model.layers.1.mlp", ("gate_proj", "up_proj", "down_proj")),
        ("model.layers.1.block_sparse_moe", ("w1", "w3", "w2")),
    ],
)
@pytest.mark.parametrize("logical", [[3], [5, 0, 2], [1, 4, 1]])
def test_only_a_ranks_experts_are_read_from_tensors_of_each(tmp_path, read, block, names, logical):
    weights = weights_of_experts()
    folder = saved(tmp_path, of_each_expert(weights, block, names))
    assert read == []
    assert_same(folder.experts(BLOCK, logical), weights, logical)
    assert sorted(read) == sorted(
        {f"{block}.experts.{x}.{name}.weight" for x in logical for name in names}
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("logical", [[3], [5, 0, 2], [1, 4, 1]])
def test_only_a_ranks_experts_are_read_from_tensors_of_all(tmp_path, read, transposed, logical):
    weights = weights_of_experts()
    biases = {"gate_up_bias": randn(E, 2 * F, seed=3), "down_bias": randn(E, D, seed=4)}
    names = {"w_gate_up": "gate_up_proj", "w_down": "down_proj"}
    tensors = {
        f"{BLOCK}.experts.{names[n]}": w.mT.contiguous() if transposed else w
        for n, w in weights.items()
    }
    tensors |= {f"{BLOCK}.experts.gate_up_proj_bias": biases["gate_up_bias"]} if transposed else {}
    tensors |= {f"{BLOCK}.experts.down_proj_bias": biases["down_bias"]} if transposed else {}
    experts = list(tensors)
    got = saved(tmp_path, tensors | {f"{BLOCK}.router.weight": randn(E, D)}).experts(BLOCK, logical)
    assert_same(got, weights | biases if transposed else weights, logical)
    assert sorted(read) == sorted({f"{name}[{x}]" for name in experts for x in logical})


def test_files_of_other_ranks_need_not_be_there(tmp_path):
    """A folder with an index: one file for each expert, and only one is left."""
    weights = weights_of_experts()
    weight_map = {}
    # A file for each tensor, of which those of expert 4 and the router are there.
    for name, tensor in of_each_expert(weights, BLOCK, ("w1", "w3", "w2")).items():
        expert = name.split(".")[5] if ".experts." in name else "router"
        file = f"{expert}-{len(weight_map)}.safetensors"
        weight_map[name] = file
        if expert in ("4", "router"):
            save_file({name: tensor}, tmp_path / file)
    index = {"weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    # Its tensors are known, and expert 4 can be read.
    folder = epmoe.SafetensorsFolder(tmp_path)
    assert folder.keys() == weight_map.keys()
    assert_same(folder.experts(BLOCK, [4]), weights, [4])
    with pytest.raises(FileNotFoundError):
        folder.experts(BLOCK, [3])


def rotated(path: Path) -> None:
    index = json.loads((path / INDEX).read_text())
    files = sorted({*index["weight_map"].values()})
    index["weight_map"] = {
        name: files[files.index(file) - 1] for name, file in index["weight_map"].items()
    }
    index["weight_map"]["model.gone"] = files[0]
    (path / INDEX).write_text(json.dumps(index))


CONFUSED = {
    "a whole file beside an index": lambda path, other: shutil.copy(other / WHOLE, path),
    "a whole file beside others": lambda path, other: [
        shutil.copy(other / WHOLE, path),
        (path / INDEX).unlink(),
    ],
    "an index with wrong entries": lambda path, other: rotated(path),
}


@pytest.mark.parametrize("confused", CONFUSED)
def test_a_confused_folder_has_the_weights_that_transformers_loads(tmp_path, confused):
    config = AutoConfig.for_model("qwen3_moe", **TINY_MODEL)
    # A folder of many files and one of one, of different weights.
    for seed, (name, size) in enumerate({"many": "50KB", "one": "1GB"}.items()):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(
            tmp_path / name, max_shard_size=size
        )
    # Files of the second one come into the first one.
    CONFUSED[confused](tmp_path / "many", tmp_path / "one")
    folder = epmoe.SafetensorsFolder(tmp_path / "many")
    want = AutoModelForCausalLM.from_pretrained(tmp_path / "many", dtype=torch.float32).state_dict()
    assert "model.gone" not in folder
    # Each tensor is the one that transformers takes.
    experts = folder.experts(BLOCK, range(config.num_experts))
    for name, tensor in want.items():
        if name.startswith(f"{BLOCK}.experts."):
            assert torch.equal(
                experts["w_" + name.rpartition(".")[2].removesuffix("_proj")], tensor
            )
        elif ".experts." not in name:
            assert torch.equal(folder[name], tensor), name


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, r"only one file must have `a`, got x.safetensors and y.safetensors$"),
        (
            {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}},
            "only one file must have `a`, got x.saf",
        ),
        (
            {"weight_map": ["a"]},
            f"{INDEX}: must have a `weight_map` of names to files, got AttributeError",
        ),
        ({"metadata": {}}, f"{INDEX}: must have a `weight_map` of names to files, got KeyError"),
    ],
)
def test_a_folder_that_says_two_things_is_refused(tmp_path, index, message):
    for name in "xy":
        save_file({"a": randn(2), name: randn(1)}, tmp_path / f"{name}.safetensors")
    if index is not None:
        (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        epmoe.SafetensorsFolder(tmp_path)


def test_a_rank_without_experts(tmp_path):
    got = saved(tmp_path, of_each_expert(weights_of_experts(), BLOCK, ("w1", "w3", "w2"))).experts(
        BLOCK, []
    )
    assert {name: list(weight.shape) for name, weight in got.items()} == {
        "w_gate_up": [0, 2 * F, D],
        "w_down": [0, D, F],
    }


def fp8_tensors(F: int) -> dict[str, Tensor]:
    tensors = {f"{BLOCK}.gate.weight": randn(E, D, seed=2)}
    for x in range(E):
        for n, (name, shape) in enumerate(
            {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}.items()
        ):
            prefix = f"{BLOCK}.experts.{x}.{name}"
            blocks = [-(-size // 128) for size in shape]
            tensors[f"{prefix}.weight"] = randn(*shape, seed=3 * x + n).to(FP8)
            tensors[f"{prefix}.weight_scale_inv"] = randn(*blocks, seed=50 + 3 * x + n).abs()
    return tensors


def test_fp8_experts_of_another_width_get_zeros_up_to_whole_blocks(tmp_path):
    """A block of scales would hold rows of gate and of up. The zeros add nothing."""
    tensors = fp8_tensors(192)
    for x in range(E):
        for name, size in {"gate_proj": 192, "up_proj": 192, "down_proj": D}.items():
            tensors[f"{BLOCK}.experts.{x}.{name}.bias"] = randn(size, seed=x).bfloat16()
    # As they are, and as fp32, which needs no blocks.
    folder = saved(tmp_path, tensors)
    padded, plain = (
        epmoe.GroupedExperts(**folder.experts(BLOCK, [3, 0], dtype=d))
        for d in (None, torch.float32)
    )
    assert (
        padded.is_fp8
        and padded.w_down.shape == (2, D, 256)
        and padded.gate_up_scales.shape == (2, 4, 2)
    )
    assert padded.gate_up_bias.shape == (2, 512) and plain.w_down.shape == (2, D, 192)
    # Without the zeros the values are those of fp32, and the zeros are zeros.
    for name in ("gate_up", "down"):
        wide = dequantize_weights(
            getattr(padded, f"w_{name}"), getattr(padded, f"{name}_scales"), torch.float32
        )
        narrow = (
            wide[..., :192] if name == "down" else torch.cat([wide[:, :192], wide[:, 256:448]], 1)
        )
        assert torch.equal(narrow, getattr(plain, f"w_{name}"))
        assert wide.count_nonzero() == narrow.count_nonzero()


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_biases_of_each_expert_are_read(tmp_path, names):
    weights = weights_of_experts()
    biases = {"gate_up_bias": randn(E, 2 * F, seed=3), "down_bias": randn(E, D, seed=4)}
    tensors = of_each_expert(weights, BLOCK, names)
    for x in range(E):
        for name, bias in zip(
            names, (*biases["gate_up_bias"][x].chunk(2), biases["down_bias"][x]), strict=True
        ):
            tensors[f"{BLOCK}.experts.{x}.{name}.bias"] = bias.clone()
    assert_same(saved(tmp_path, tensors).experts(BLOCK, [4, 0]), weights | biases, [4, 0])


def each() -> dict[str, Tensor]:
    return of_each_expert(weights_of_experts(), BLOCK, ("gate_proj", "up_proj", "down_proj"))


def fused() -> dict[str, Tensor]:
    weights = weights_of_experts()
    experts = {
        f"{BLOCK}.experts.gate_up_proj": weights["w_gate_up"],
        f"{BLOCK}.experts.down_proj": weights["w_down"],
    }
    return experts | {f"{BLOCK}.gate.weight": randn(E, D, seed=2)}


def changed(tensors: dict[str, Tensor], part: str, change) -> dict[str, Tensor]:
    """Tensors of the experts, of which `change` replaces those that have `part` in their names;
    None removes one.
    """
    new = {name: change(tensor) if part in name else tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in new.items() if tensor is not None}


def added(tensors: dict[str, Tensor], *names: str, like: Tensor | None = None) -> dict[str, Tensor]:
    return tensors | {
        f"{BLOCK}.{name}": torch.ones(1) if like is None else like.clone() for name in names
    }


def without(tensors: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


BF16 = torch.bfloat16
SCALES = "weight_scale_inv"
OF = f"the experts of `{BLOCK}`, 0 to 5 as its router has 6 rows, have"
WRONG = {
    "bf16 expert 0 among fp8 experts, all with scales": (
        lambda: changed(
            fp8_tensors(F), ".0.down_proj.weight", lambda t: t if t.dtype != FP8 else t.to(BF16)
        ),
        (
            rf"`{BLOCK}.experts.1.down_proj.weight` is F8_E4M3 \[256, 128\], but "
            rf".*experts.0.down_proj.weight` is BF16 \["
        ),
    ),
    "an expert of another dtype": (
        lambda: changed(each(), ".4.up_proj", Tensor.half),
        (
            r"experts.4.up_proj.weight` is F16 .*0.gate_proj.weight` is F32 .*: all experts must "
            r"have one format"
        ),
    ),
    "more experts": (
        lambda: added(
            each(), *(f"experts.6.{name}_proj.weight" for name in ("gate", "up", "down"))
        ),
        (
            rf"{OF} experts.\*.down_proj.weight, .*, but got also "
            rf"{BLOCK}.experts.6.down_proj.weight, "
        ),
    ),
    "a gap": (
        lambda: without(each(), "experts.2."),
        rf"{OF} .* lack {BLOCK}.experts.2.down_proj.weight, ",
    ),
    "a bias of one expert": (
        lambda: added(each(), "experts.3.down_proj.bias"),
        r"experts.\*.down_proj.bias, .*, but lack .*experts.0.down_proj.bias, .*experts.1.",
    ),
    "three scales for a weight": (
        lambda: changed(fp8_tensors(F), SCALES, lambda t: t.flatten()[:1].repeat(3)),
        (
            r"gate_proj.weight_scale_inv` is F32 \[3\], but scales must be F32 .* \[1, 2\] for "
            r"\[128, 256\], one for each"
        ),
    ),
    "NVFP4 without scales of matrices": (
        lambda: (
            {
                name.replace("weight", "weight_packed").replace("packed_scale_inv", "scale"): (
                    tensor.view(torch.uint8)[:, ::2].clone()
                    if tensor.dtype == FP8
                    else torch.ones(128, 16).to(FP8)
                )
                for name, tensor in fp8_tensors(F).items()
                if ".experts." in name
            }
            | {f"{BLOCK}.gate.weight": randn(E, D)}
        ),
        (
            r"weight_scale` is F8_E4M3 \[128, 16\], but scales must be U8 or F8_E8M0 .*one for "
            r"each group of 32"
        ),
    ),
    "integers as scales": (
        lambda: changed(fp8_tensors(F), SCALES, Tensor.int),
        r"gate_proj.weight_scale_inv` is I32 \[1, 2\], but scales must be F32 or F16 or BF16 ",
    ),
    "fp8 without scales": (
        lambda: without(fp8_tensors(F), SCALES),
        r"experts.0.gate_proj.weight` is F8_E4M3 \[128, 256\], without a `weight_scale_inv`",
    ),
    "scales beside bf16": (
        lambda: changed(
            fp8_tensors(F), "_proj.weight", lambda t: t.to(BF16) if t.dtype == FP8 else t
        ),
        (
            r"gate_proj.weight_scale_inv` is F32 .* but .*gate_proj.weight` is BF16 .*, which "
            r"needs no scales"
        ),
    ),
    "packed weights": (
        lambda: changed(each(), "_proj.weight", Tensor.byte),
        (
            r"gate_proj.weight` is U8 .*, and .*down_proj.weight` is U8 .*: both must have one "
            r"dtype of F64, F32, "
        ),
    ),
    "down in another dtype": (
        lambda: changed(each(), "down_proj", Tensor.half),
        r"gate_proj.weight` is F32 .*, and .*down_proj.weight` is F16 .*: both must have one dtype",
    ),
    "shapes that do not fit": (
        lambda: changed(each(), "down_proj", lambda t: t[:, 1:].clone()),
        (
            r"gate_proj.weight` is F32 \[128, 256\], and .*down_proj.weight` is F32 \[256, 127\], "
            r"which do not fit"
        ),
    ),
    "two formats": (
        lambda: each() | fused(),
        r"got also .*experts.down_proj, .*experts.gate_up_proj$",
    ),
    "fused, more experts": (
        lambda: changed(fused(), "experts.down_proj", lambda t: torch.cat([t, t[:1]])),
        r"experts.down_proj` is F32 \[7, 256, 128\], but must have 6 rows, as the router has",
    ),
    "fused, shapes that do not fit": (
        lambda: changed(fused(), "experts.down_proj", lambda t: t[:, 1:].clone()),
        (
            r"gate_up_proj` is F32 \[6, 256, 256\], and .*down_proj` is F32 \[6, 255, 128\], which "
            r"do not fit"
        ),
    ),
    "fused, with scales": (
        lambda: added(fused(), "experts.gate_up_proj_scale_inv", "experts.down_proj_scale_inv"),
        r"got also .*experts.down_proj_scale_inv, .*experts.gate_up_proj_scale_inv$",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_experts_of_another_format_are_refused(tmp_path, wrong):
    """The error names the file and the tensors, whichever experts a rank asks for."""
    make, message = WRONG[wrong]
    folder = saved(tmp_path, make())
    for logical in ([1], [4, 0]):
        with pytest.raises(ValueError, match=rf"^{tmp_path}/model.safetensors: .*{message}"):
            folder.experts(BLOCK, logical)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["gate.weight_scale_inv"],
            f"must have a `gate.weight`.* got also {BLOCK}.gate.weight_scale_inv",
        ),
        (
            ["gate.per_expert_scale", "gate.scale"],
            rf"got also {BLOCK}.gate.per_expert_scale, {BLOCK}.gate.scale$",
        ),
        (
            ["gate.e_score_correction_bias", "expert_bias"],
            f"one bias of the choice, got also {BLOCK}.gate.e_score_corr",
        ),
    ],
)
def test_a_router_of_another_format_is_refused(tmp_path, names, message):
    folder = saved(tmp_path, added(each(), *names, like=randn(E)))
    assert folder.experts(BLOCK, [2]).keys() == {"w_gate_up", "w_down"}
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/model.safetensors: the router of `{BLOCK}` .*{message}"
    ):
        folder.router(BLOCK)


@pytest.mark.parametrize("make", [each, fused])
@pytest.mark.parametrize("x", [-1, E])
def test_an_expert_that_the_router_does_not_know(tmp_path, make, x):
    folder = saved(tmp_path, make())
    with pytest.raises(LookupError, match=rf"`{BLOCK}` has the experts 0 to 5, got \[{x}\]"):
        folder.experts(BLOCK, [2, x])


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (E - 2, r"`router_weight` must be \[4, 256\], got \[6, 256\]"),
        (E + 2, r"the experts 0 to 5, got \[6, 7\]"),
    ],
)
def test_a_config_of_another_number_of_experts(tmp_path, experts, message):
    folder = saved(tmp_path, each())
    config = alone(experts, hidden=D)
    error = pytest.raises((ValueError, LookupError), match=message)
    with epmoe.ExpertParallel(config, device="cpu") as ep, error:
        epmoe.MoELayer.from_safetensors(ep, folder, BLOCK)


FORMATS = [
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "minimax_m2",
    "granitemoe",
    "ernie4_5_moe",
    "hy_v3",
    "llama4_text",
]
"""A model type for each set of names that checkpoints have."""


def layer_as_configured(
    ep: epmoe.ExpertParallel, folder: epmoe.SafetensorsFolder, block: str
) -> epmoe.MoELayer:
    """The layer, made of what `EPConfig.from_hf` knows of the experts and nothing else."""
    experts = ep.config.experts
    layer = epmoe.MoELayer.from_safetensors(ep, folder, block, **experts.options)
    assert [layer.experts.gate_up_bias is not None, layer.experts.down_bias is not None] == [
        experts.biases
    ] * 2
    return layer


@pytest.mark.parametrize("model_type", FORMATS)
@torch.no_grad()
def test_a_layer_equals_the_block_of_transformers(model_type, tmp_path):
    model = tiny_model(model_type, tmp_path)
    config = epmoe.EPConfig.from_hf(tmp_path, ep_size=1, model={"dtype": "float32"})
    name, block = [
        (name, block) for name, block in model.named_modules() if hasattr(block, "experts")
    ][-1]
    with epmoe.ExpertParallel(config, device="cpu") as ep:
        layer = layer_as_configured(ep, epmoe.SafetensorsFolder(tmp_path), name)
        assert (layer.bias is not None) == config.routing.selection_bias
        x = randn(1, 9, 64)
        want = block(x)[0] if isinstance(block(x), tuple) else block(x)
        shared = getattr(block, "shared_experts", getattr(block, "shared_expert", None))
        assert_close(
            layer(x), (want.view_as(x) - (0 if shared is None else shared(x))).double(), slack=4
        )


def layer_without(layer, name):
    twin = copy.deepcopy(layer)
    setattr(twin, name, None)
    return twin


def test_a_layer_of_gpt_oss():
    with saved_model("gpt_oss") as path, torch.no_grad():
        block = AutoModelForCausalLM.from_pretrained(path).get_submodule(BLOCK)
        folder = epmoe.SafetensorsFolder(path)
        config = epmoe.EPConfig.from_hf(path, ep_size=1, capacity={"max_num_tokens_per_rank": 8})
        # One expert alone,
        experts = epmoe.GroupedExperts(**folder.experts(BLOCK, [7]), **config.experts.options)
        rows = randn(5, 96)
        ids = torch.full((5, 1), 7)
        want = block.experts(rows, ids, torch.ones(5, 1))
        assert_close(experts(rows, torch.tensor([0, 5], dtype=torch.int32)), want.double(), slack=4)
        # the whole layer, whose router has a bias of the logits,
        with epmoe.ExpertParallel(config) as ep:
            layer = layer_as_configured(ep, folder, BLOCK)
            y = layer(rows)
            assert_close(y, block(rows[None])[0][0].double(), slack=4)
            assert layer.logit_bias.any() and not torch.equal(
                y, layer_without(layer, "logit_bias")(rows)
            )
            # and a copy in bf16, whose router stays in fp32.
            twin = layer_as_configured(ep, folder, BLOCK).to(torch.bfloat16)
            assert twin.logit_bias.dtype == torch.float32, "a router keeps its precision"
            twin.load_state_dict(layer.state_dict())
            assert torch.equal(twin.logit_bias, layer.logit_bias)
            with pytest.raises(ValueError, match=r"`logit_bias` must be float32 \[\d+\]"):
                epmoe.MoELayer(ep, layer.router_weight, layer.experts, logit_bias=torch.zeros(3))


def test_a_bias_of_the_choice_makes_the_router_fp32(tmp_path):
    tensors = {"a.gate.weight": randn(E, D).bfloat16(), "b.gate.weight": randn(E, D).bfloat16()}
    folder = saved(tmp_path, tensors | {"a.gate.e_score_correction_bias": randn(E).bfloat16()})
    a = folder.router("a")
    b = folder.router("b")
    assert a["router_weight"].dtype == a["bias"].dtype == torch.float32
    assert torch.equal(a["router_weight"], tensors["a.gate.weight"].float())
    assert (
        b["router_weight"].dtype == torch.bfloat16 and b["bias"] is None and b["logit_bias"] is None
    )


@pytest.mark.parametrize("bias", [{}, {f"{BLOCK}.gate.bias": randn(E).bfloat16()}])
def test_a_router_in_another_dtype(tmp_path, bias):
    tensors = {name: tensor.bfloat16() for name, tensor in each().items()}
    config = alone(E, hidden=D, dtype="bfloat16", routing={"logit_bias": bool(bias)})
    with epmoe.ExpertParallel(config, device="cpu") as ep:
        folder = saved(tmp_path, tensors | bias)
        layer = epmoe.MoELayer.from_safetensors(ep, folder, BLOCK, router_dtype=torch.float32)
    assert layer.router_weight.dtype == torch.float32 and layer.experts.dtype == torch.bfloat16
    assert (layer.logit_bias is not None) == bool(bias) and layer.logits(
        randn(2, D)
    ).dtype == torch.float32


@pytest.mark.parametrize("given", [False, True])
@torch.no_grad()
def test_what_a_bias_of_the_gate_is_says_the_config(tmp_path, given):
    """DeepSeek's own files have the bias of the choice there, also where a caller gives it."""
    bias = 3 * randn(E, seed=7)
    folder = saved(tmp_path, each() | {f"{BLOCK}.gate.bias": bias})
    x = randn(9, D)
    plain = x @ folder[f"{BLOCK}.gate.weight"].T
    refusal = rf"`{BLOCK}.gate.bias` must be said to be .*`routing.logit_bias`.*selection_bias`$"
    # The config says the one, the other, or neither, which is refused.
    for routing, biases in (
        ({"selection_bias": True}, ["bias"]),
        ({"logit_bias": True}, ["logit_bias"]),
        ({}, None),
    ):
        config = alone(E, hidden=D, routing=routing)
        options = {name: bias for name in biases or ["bias"] if given}
        with epmoe.ExpertParallel(config, device="cpu") as ep:
            if biases is None:
                with pytest.raises(ValueError, match=refusal):
                    epmoe.MoELayer.from_safetensors(ep, folder, BLOCK, **options)
                continue
            layer = epmoe.MoELayer.from_safetensors(ep, folder, BLOCK, **options)
            # The layer has the bias that the config says, and its logits have it or not.
            got = [name for name in ("bias", "logit_bias") if getattr(layer, name) is not None]
            assert got == biases
            assert_close(layer.logits(x), (plain + bias * ("bias" not in got)).double(), slack=4)
            epmoe.checkpoint.save_pretrained(
                torch.nn.ModuleDict({"model": nested(layer)}), tmp_path / got[0], folder
            )
        # It is saved under the name that it had.
        again = epmoe.SafetensorsFolder(tmp_path / got[0])
        assert {name: tensor.tolist() for name, tensor in again.items()} == {
            name: tensor.tolist() for name, tensor in folder.items()
        }


def test_a_bias_of_the_choice_is_refused_where_the_config_does_not_say_it(tmp_path):
    tensors = added(each(), "gate.e_score_correction_bias", like=randn(E))
    folder = saved(tmp_path, tensors)
    refusal = rf"{tmp_path}: the router of `{BLOCK}` has a bias of the choice, so .*selection_bias"
    with epmoe.ExpertParallel(alone(E, hidden=D), device="cpu") as ep:
        with pytest.raises(ValueError, match=refusal):
            epmoe.MoELayer.from_safetensors(ep, folder, BLOCK)
        with pytest.raises(ValueError, match="`bias` must be None, unless"):
            epmoe.MoELayer.from_safetensors(ep, folder, BLOCK, bias=torch.zeros(E))
        # The caller may leave it out, by its name.
        assert epmoe.MoELayer.from_safetensors(ep, folder, BLOCK, bias=None).bias is None


def nested(layer: epmoe.MoELayer) -> torch.nn.Module:
    """The module `model` of a model that has the layer as BLOCK."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    model.layers[1].mlp = layer
    return model


def test_both_biases_under_names_of_the_choice_are_refused(tmp_path):
    tensors = added(each(), "gate.bias", "gate.e_score_correction_bias", like=randn(E))
    folder = saved(tmp_path, tensors)
    assert folder.router(BLOCK).keys() == {"router_weight", "bias", "logit_bias"}
    with pytest.raises(ValueError, match="one bias of the choice, got also .*gate.e_score_corr"):
        folder.router(BLOCK, "choice")


STEP = BLOCK.replace("mlp", "moe")


def of_step(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint of Step 3.5."""
    gate, up = weights["w_gate_up"].chunk(2, 1)
    return {
        f"{STEP}.gate.weight": randn(E, D, seed=2),
        f"{STEP}.router_bias": randn(E, seed=3),
        f"{STEP}.gate_proj.weight": gate.contiguous(),
        f"{STEP}.up_proj.weight": up.contiguous(),
        f"{STEP}.down_proj.weight": weights["w_down"],
    }


def test_experts_of_step_are_read_from_three_tensors(tmp_path, read):
    """Also fp8 with scales of blocks, and saved under the same names."""
    weights = weights_of_experts()
    folder = saved(tmp_path, of_step(weights))
    assert read == []
    # Of each tensor the experts of this rank alone are read.
    assert_same(folder.experts(BLOCK, [5, 0]), weights, [5, 0])
    names = ("gate_proj", "up_proj", "down_proj")
    assert sorted(read) == sorted(f"{STEP}.{name}.weight[{x}]" for x in (5, 0) for name in names)
    assert torch.equal(folder.router(BLOCK)["bias"], folder[f"{STEP}.router_bias"])
    # A layer of them is saved under the same names.
    config = alone(E, hidden=D, routing={"selection_bias": True})
    with epmoe.ExpertParallel(config, device="cpu") as ep:
        layer = epmoe.MoELayer.from_safetensors(ep, folder, BLOCK)
        model = torch.nn.ModuleDict({"model": nested(layer)})
        epmoe.checkpoint.save_pretrained(model, tmp_path / "end", folder)
    again = epmoe.SafetensorsFolder(tmp_path / "end")
    assert again.keys() == folder.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in folder.items())

    # The same in fp8, with scales of blocks.
    quantized = dict(folder)
    for name in (f"{STEP}.{name}.weight" for name in names):
        n, k = (-(-size // 128) for size in folder[name].shape[1:])
        quantized[name] = folder[name].to(FP8)
        quantized[f"{name}_scale_inv"] = torch.full((E, n, k), 0.5)
    (tmp_path / "fp8").mkdir()
    experts = saved(tmp_path / "fp8", quantized).experts(BLOCK, [4])
    assert experts["w_gate_up"].dtype == FP8
    want = {name: weight.to(FP8).float() * 0.5 for name, weight in weights.items()}
    for part in ("gate_up", "down"):
        got = dequantize_weights(experts[f"w_{part}"], experts[f"{part}_scales"], torch.float32)
        assert torch.equal(got, want[f"w_{part}"][[4]])


def test_tensors_of_a_shared_expert_are_not_those_of_experts(tmp_path):
    """Where a block has both, those of Step's names are the block's own."""
    shared = {f"{BLOCK}.{name}": randn(4, 4) for name in ("gate_proj.weight", "up_proj.weight")}
    folder = saved(tmp_path, each() | shared)
    assert folder.stored(BLOCK).others == shared.keys()


def test_what_a_checkpoint_lacks_is_named(tmp_path):
    # No files, and one that is no file of safetensors.
    with pytest.raises(ValueError, match=r"has no weights \(\*.safetensors\)"):
        epmoe.SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ValueError, match=r"model.safetensors: .*header"):
        epmoe.SafetensorsFolder(tmp_path)
    # A block in a format that nobody knows, and one that is fine.
    tensors = {
        f"{BLOCK}.gate.weight": randn(E, D),
        f"{BLOCK}.experts.gate_up_proj_blocks": randn(E, D),
    }
    fine = of_each_expert(weights_of_experts(), "fine", ("w1", "w3", "w2"))
    folder = saved(tmp_path, tensors | fine)
    with pytest.raises(ValueError, match=r"has no MoE block `model.layers.0.mlp`"):
        folder.experts("model.layers.0.mlp", [0])
    with pytest.raises(
        ValueError,
        match=rf"experts of `{BLOCK}` must be .*, got {BLOCK}.experts.gate_up_proj_blocks, ",
    ):
        folder.experts(BLOCK, [0])
    with pytest.raises(LookupError):
        folder.experts("fine", [E])


@pytest.mark.parametrize(
    "wrong",
    [{"w_down": randn(E - 1, D, F)}, {"down_bias": randn(D)}, {"w_gate_up": randn(2 * F, D)}],
)
def test_from_full_needs_a_row_for_each_expert(wrong):
    with epmoe.ExpertParallel(alone(E, hidden=D), device="cpu") as ep:
        (name,) = wrong
        with pytest.raises(
            ValueError, match=rf"`{name}` must have a row for each of 6 experts, got \["
        ):
            epmoe.MoELayer.from_full(ep, randn(E, D), **weights_of_experts() | wrong)
