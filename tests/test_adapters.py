"""LoRA adapters of experts in one process. tests/distributed/test_adapters.py has them over several
ranks.
"""

from __future__ import annotations

import copy
import json
from itertools import chain

import adapter_models
import pytest
import torch
from expert_inputs import MXFP4, quantized, random_mxfp4
from helpers import alone, assert_close, poisoned_memory, randn
from torch import Tensor

import epmoe
from epmoe.checkpoint import load_adapter
from epmoe.local.adapters import ExpertAdapters, LoRA
from epmoe.local.weight_formats import dequantize_weights
from epmoe.native.arguments import FP8

E = 4
K = 2
D = 64
F = 32
T = 12
BLOCK = "model.layers.0.mlp"
SIZES = E, D, 2 * F, F
FACTORS = adapter_models.draw(E, D, F, 4, seed=1)
ALL = list(range(E))


def config(**sections: object) -> epmoe.EPConfig:
    return alone(E, K, D, max_tokens=16, **{"capacity": {"extra_bytes": 4}} | sections)


def layer_of(
    ep: epmoe.ExpertParallel, dtype: torch.dtype = torch.float32, **options: object
) -> epmoe.MoELayer:
    weights = randn(E, D, seed=1) / 4, randn(E, 2 * F, D, seed=2) / 4, randn(E, D, F, seed=3) / 4
    router, *experts = weights
    layer = epmoe.MoELayer.from_full(
        ep, router, *(w.to(dtype) for w in experts), **{"adapters": 2, "adapter_rank": 4} | options
    )
    if layer.adapters is not None:
        layer.adapters.put_local(1, adapter_models.adapter_of(FACTORS, E, ALL, 2.0))
    return layer


@pytest.fixture
def ep(device: torch.device):
    with epmoe.ExpertParallel(config(), device=device) as ep:
        yield ep


def tokens(device: torch.device) -> tuple[Tensor, Tensor]:
    return randn(T, D, seed=5).to(device), (torch.arange(T, dtype=torch.int32) % 3 - 1).to(device)


def want(layer: epmoe.MoELayer, x: Tensor, numbers: Tensor) -> Tensor:
    ids, weights = (value.cpu() for value in layer.ep.route(layer.logits(x)))
    base = layer.experts.w_gate_up.detach().cpu(), layer.experts.w_down.detach().cpu()
    return adapter_models.merged_reference(
        x.cpu(), ids, weights, base, {1: (FACTORS, 2.0)}, numbers.cpu()
    )


@torch.no_grad()
def test_one_rank(ep):
    layer = layer_of(ep)
    x, numbers = tokens(ep.device)
    y = layer(x, adapter_ids=numbers)
    assert_close(y, want(layer, x, numbers), slack=4)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x, adapter_ids=numbers), y)
    assert torch.equal(
        layer(x, adapter_ids=torch.full_like(numbers, 2**32 + 1, dtype=torch.int64)), layer(x)
    )
    layer.adapters.clear_local(1)
    assert torch.equal(layer(x, adapter_ids=numbers), layer(x)) and torch.equal(
        twin(x, adapter_ids=numbers), y
    )
    assert "2 of rank 4" in repr(layer)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(ep, dynamic):
    """The adapters of tokens are an input of the graph."""
    layer = layer_of(ep)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    x, numbers = tokens(ep.device)
    for given in (numbers, numbers.roll(1)):
        assert torch.equal(compiled(x, adapter_ids=given), layer(x, adapter_ids=given))
    assert torch.equal(compiled(x), layer(x))


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{}, {"interleaved": True, "limit": 1.0, "alpha": 1.7, "up_offset": 1.0}]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, FP8])
def test_experts_with_adapters(device, dtype, options):
    """Every GEMM, biases, rows that are no pair's and hold NaN, and rows with a stride."""
    width = 128 if dtype == FP8 else F
    hidden = 128 if dtype == FP8 else D
    gate_up = randn(E, 2 * width, hidden, seed=1) / 8
    down = randn(E, hidden, width, seed=2) / 8
    out = torch.bfloat16 if dtype == FP8 else dtype
    given = {
        "gate_up_bias": randn(E, 2 * width, seed=3).to(out),
        "down_bias": randn(E, hidden, seed=4).to(out),
    }
    if dtype == FP8:
        given |= {
            "gate_up_scales": torch.ones(E, width // 64, 1),
            "down_scales": torch.ones(E, 1, 1),
        }
    given = {name: value.to(device) for name, value in given.items()}
    experts = epmoe.GroupedExperts(
        gate_up.to(device, dtype), down.to(device, dtype), gemm="torch", **given, **options
    )

    # One adapter, with number 2 of three. The other numbers are none.
    adapters = ExpertAdapters(experts, 3, 5)
    factors = adapter_models.draw(E, hidden, width, 3, seed=7)
    adapters.put_local(2, adapter_models.adapter_of(factors, E, ALL, 0.5))

    # Nine rows of pairs and three of NaN, with a stride.
    offsets = torch.tensor([0, 3, 3, 7, 9], dtype=torch.int32, device=device)
    wide = torch.full((12, hidden + 16), torch.nan, dtype=out, device=device)
    rows = wide[:, :hidden]
    rows[:9] = randn(9, hidden, seed=6).to(device, out)
    numbers = torch.tensor(
        [2, -1, 0, 2, 2, 1, -1, 2, 9, 2, 7, -5], dtype=torch.int32, device=device
    )

    # Rows without an adapter have the bits of experts without.
    got = experts(rows, offsets, added=adapters.of_rows(numbers))
    plain = experts(rows, offsets)
    has = numbers[:9] == 2
    assert torch.equal(got[:9][~has], plain[:9][~has])

    # The others are those of experts with which the adapter is merged, in fp64.
    weights = {name: getattr(experts, name).double() for name in ("w_gate_up", "w_down")}
    for name, part in (("w_gate_up", "gate_up"), ("w_down", "down")):
        weights[name] = weights[name] + adapter_models.delta(factors, part, E, 0.5).to(device)
    biases = {name: given[name].double() for name in ("gate_up_bias", "down_bias")}
    merged = epmoe.GroupedExperts(**weights, **biases, **options)(rows.double(), offsets)
    error = (got[:9].double() - merged[:9])[has].norm() / merged[:9][has].norm()
    assert error < {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 1e-2), error


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "payload", "tokens"),
    [
        *((FP8, payload, tokens) for payload in ("auto", "fp8") for tokens in (6, 16)),
        (MXFP4, "auto", 12),
    ],
)
def test_quantized_experts(device, dtype, payload, tokens):
    """fp8 on GPUs of compute capability 9.0 by DeepGEMM, also where its kernels for few rows would
    serve without. Adapters go by the numbers of a weight, of which a byte of MXFP4 has two.
    """
    n = 128
    shapes = (E, 2 * n, n), (E, n, n)
    # Weights in the format, and their values in fp64.
    if dtype == FP8:
        pairs = [quantized(randn(*shape, seed=i) / 16) for i, shape in enumerate(shapes)]
    else:
        pairs = [random_mxfp4(*shape, seed=i) for i, shape in enumerate(shapes)]
    (gate_up, gate_up_scales), (down, down_scales) = pairs
    base = tuple(dequantize_weights(*pair, torch.float64) for pair in pairs)
    factors = adapter_models.draw(E, n, n, 4, seed=3)
    model = {"hidden_size": n, "dtype": "bfloat16"}
    with epmoe.ExpertParallel(
        config(model=model, exchange={"payload": payload}), device=device
    ) as ep:
        options = {
            "gate_up_scales": gate_up_scales,
            "down_scales": down_scales,
            "adapters": 2,
            "adapter_rank": 8,
        }
        layer = epmoe.MoELayer.from_full(ep, randn(E, n) / 4, gate_up, down, **options)
        layer.adapters.put_local(1, adapter_models.adapter_of(factors, E, ALL, 0.5))

        # Tokens with the adapter and without, by turns.
        x = randn(tokens, n, seed=5, dtype=torch.bfloat16).to(device)
        numbers = (torch.arange(tokens) % 2).to(device, torch.int16)
        ids, weights = (value.cpu() for value in ep.route(layer.logits(x)))

        # Both are as near to the reference as the format allows.
        want = adapter_models.merged_reference(
            x.cpu(), ids, weights, base, {1: (factors, 0.5)}, numbers.cpu()
        )
        got = layer(x, adapter_ids=numbers).cpu().double()
        for number in (0, 1):
            mine = numbers.cpu() == number
            error = (got - want)[mine].norm() / want[mine].norm()
            assert error < (0.1 if dtype == FP8 else 0.02), error


def test_what_adapters_refuse(ep):
    layer = layer_of(ep)
    good = adapter_models.adapter_of(FACTORS, E, ALL, 1.0)
    (a, b), down = good
    # A number, an adapter, and what is wrong with them.
    for number, adapter, says in [
        (2, good, "from 0 to 1, got 2"),
        (-1, good, "from 0 to 1, got -1"),
        (
            0,
            LoRA((a[:3], b), down),
            r"`gate_up a` must be .* \[4, r, 64\], got float32 \[3, 4, 64\]",
        ),
        (
            0,
            LoRA((a, b[..., :3]), down),
            r"`gate_up b` must be .* \[4, 64, 4\], got float32 \[4, 64, 3\]",
        ),
        (
            0,
            LoRA((a.repeat(1, 2, 1), b.repeat(1, 1, 2)), down),
            "at most `adapter_rank` = 4, got 8",
        ),
        (0, LoRA((a, b), (down[0], down[1] / 0)), "`down` has values that are not finite"),
    ]:
        with pytest.raises(ValueError, match=says):
            layer.adapters.put_local(number, adapter)
    # No refused adapter has changed anything, and an adapter may leave a matrix out.
    with torch.no_grad():
        x, numbers = tokens(ep.device)
        assert_close(layer(x, adapter_ids=numbers), want(layer, x, numbers), slack=4)
    layer.adapters.put_local(0, LoRA(None, down))


@torch.no_grad()
def test_casts_and_moves_keep_adapters_or_lose_them(ep, device):
    """No state dict fills them after `to_empty`. A cast may make Inf of a number, which would reach
    all tokens.
    """
    (a, b), down = adapter_models.adapter_of(FACTORS, E, ALL, 1.0)
    x, numbers = tokens(ep.device)
    layer = layer_of(ep)
    # A cast to the same dtype changes nothing, and one to fp16 rounds.
    y = layer(x, adapter_ids=numbers)
    assert torch.equal(layer.to(device).float()(x, adapter_ids=numbers), y)
    half = copy.deepcopy(layer).half()
    error = (half(x.half(), adapter_ids=numbers).float() - y).abs().max() / y.abs().max()
    assert 0 < error < 1e-2 and not half.adapters.lost
    # Values that fp16 does not hold.
    with pytest.raises(ValueError, match="`gate_up` has values that are not finite in float16"):
        half.adapters.put_local(0, LoRA((a, b + 7e4), down))
    layer.adapters.put_local(0, LoRA((a, b + 7e4), down))
    # Memory without values: kept where it is the same, lost from `meta`.
    with poisoned_memory():
        kept = copy.deepcopy(layer).to_empty(device=device)
        from_meta = copy.deepcopy(layer).to("meta").to_empty(device=device)
    assert all(
        torch.equal(*pair)
        for pair in zip(kept.adapters.buffers(), layer.adapters.buffers(), strict=True)
    )
    # Lost ones serve nothing until each was loaded or cleared.
    for lost in (copy.deepcopy(layer).half(), from_meta):
        assert not any(buffer.any() for buffer in lost.adapters.buffers())
        with pytest.raises(
            epmoe.EPStateError, match=r"adapter\(s\) \[0, 1\] are not whole any more"
        ):
            lost(x.to(lost.experts.dtype), adapter_ids=numbers)
        lost.adapters.clear_local(0)
        lost.adapters.put_local(1, LoRA(None, down))


@pytest.mark.parametrize("cast", [False, True])
def test_a_layer_made_or_cast_in_inference_mode_takes_adapters_outside(ep, cast):
    with torch.inference_mode(not cast):
        layer = layer_of(ep)
    with torch.inference_mode():
        if cast:
            layer.adapters.half()
    with torch.no_grad():
        layer.put_adapter(0, adapter_models.adapter_of(FACTORS, E, ALL, 2.0))
        layer.adapters.clear_local(0)
    assert layer.adapters.numbers == {1}


def test_what_layers_refuse(ep, device):
    # Arguments of the layer, and other experts than ours.
    for options, says in [
        ({"adapters": 0}, "`adapters` must be an int of at least 1, got 0"),
        ({"adapter_rank": 0}, "`adapter_rank` must be an int of at least 1"),
        (
            {"exchange": epmoe.training.TrainingExchange(ep)},
            "`exchange` must be unset with `adapters`",
        ),
    ]:
        with pytest.raises(ValueError, match=says):
            layer_of(ep, **options)
    with pytest.raises(ValueError, match="`experts` must be GroupedExperts with `adapters`"):
        epmoe.MoELayer(ep, randn(E, D), lambda rows, offsets, scales: rows, adapters=1)

    # Configs that leave no room for numbers, or apply weights to inputs.
    for sections, says in [
        (
            {"capacity": {}},
            "`capacity.extra_bytes` must be at least 4 with `adapters`, got 0",
        ),
        (
            {"experts": {"weights_on_input": True}},
            "`experts.weights_on_input` must be unset with `adapters`",
        ),
    ]:
        with (
            epmoe.ExpertParallel(config(**sections), device=device) as other,
            pytest.raises(ValueError, match=says),
        ):
            layer_of(other)
    with (
        epmoe.ExpertParallel(config(), device=device) as other,
        pytest.raises(ValueError, match="must be over `ep`"),
    ):
        layer_of(ep, adapters=None, exchange=epmoe.training.TrainingExchange(other))

    # Batch-invariant experts.
    says = "`experts` must not be batch_invariant with adapters"
    if device.type == "cuda":
        # those of float32, with or without adapters
        says = "`batch_invariant` must be False for these experts"
    with pytest.raises(ValueError, match=says):
        layer_of(ep, batch_invariant=True)

    # Calls of layers without adapters, and calls with gradients.
    x, numbers = tokens(device)
    plain = layer_of(ep, adapters=None)
    layer = layer_of(ep)
    with torch.no_grad(), pytest.raises(ValueError, match="`adapter_ids` must be None"):
        plain(x, adapter_ids=numbers)
    with pytest.raises(ValueError, match="`adapters` must be given to the layer"):
        plain.load_adapter(0, "nowhere", BLOCK)
    with pytest.raises(
        RuntimeError,
        match=r"only serves.*torch.no_grad\(\); layers with `adapters` have no gradients",
    ):
        layer(x.clone().requires_grad_(), adapter_ids=numbers)
    assert not layer(x, adapter_ids=numbers).requires_grad, (
        "in grad mode it serves, since no parameter requires grad"
    )
    layer.requires_grad_(True)
    with pytest.raises(RuntimeError, match="layers with `adapters` have no gradients"):
        layer(x)


@pytest.mark.parametrize("targets", [("gate_up", "down"), ("down",), ("gate_up",)])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}])
@pytest.mark.parametrize("held", [ALL, [3, 1], []])
def test_folders_of_peft(tmp_path, targets, options, held):
    factors = {name: value for name, value in FACTORS.items() if name.startswith(targets)}
    adapter_models.save(tmp_path, factors, BLOCK, torch.bfloat16, lora_alpha=6, **options)
    adapter = load_adapter(tmp_path, BLOCK, held, SIZES)
    scaling = 6 / (2 if options else 4)
    for name, part in adapter._asdict().items():
        if name not in targets:
            assert part is None
            continue
        a, b = part
        rounded = {key: value.bfloat16() for key, value in factors.items()}
        torch.testing.assert_close(
            b.double() @ a.double(), adapter_models.delta(rounded, name, E, scaling)[held]
        )


def test_a_folder_with_a_model_too(tmp_path):
    """Neither model.safetensors nor its index has a say in what an adapter is."""
    adapter_models.save(tmp_path, FACTORS, BLOCK)
    want = load_adapter(tmp_path, BLOCK, ALL, SIZES)
    (tmp_path / "other").mkdir()
    adapter_models.save(tmp_path / "other", adapter_models.draw(E, D, F, 4, seed=2), BLOCK)
    (tmp_path / "other" / "adapter_model.safetensors").rename(tmp_path / "model.safetensors")
    index = {
        "weight_map": dict.fromkeys(
            [f"base_model.model.{BLOCK}.experts.lora_A.weight"], "model.safetensors"
        )
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    got = load_adapter(tmp_path, BLOCK, ALL, SIZES)
    assert all(torch.equal(*pair) for pair in zip(chain(*got), chain(*want), strict=True))


@pytest.mark.parametrize(
    ("version", "interleaved", "read"),
    [
        (None, False, False),
        ("0.18.1", False, False),
        ("0.19.0", False, False),
        ("0.20.0", False, True),
        (None, True, True),
        ("0.18.1", True, True),
        ("0.19.0", True, False),
        ("1.0.0.dev0", True, True),
    ],
)
def test_square_weights_of_older_releases_of_peft(tmp_path, version, interleaved, read):
    """There b · a is transposed, and shapes do not tell."""
    adapter_models.save(tmp_path, FACTORS, BLOCK, peft_version=version)
    if read:
        assert (
            load_adapter(tmp_path, BLOCK, ALL, SIZES, interleaved=interleaved).gate_up is not None
        )
    else:
        with pytest.raises(
            ValueError, match=r"square weights \[64, 64\] .* PEFT 0.20 or newer, got `peft_version`"
        ):
            load_adapter(tmp_path, BLOCK, ALL, SIZES, interleaved=interleaved)
    down = {name: value for name, value in FACTORS.items() if name.startswith("down")}
    adapter_models.save(tmp_path, down, BLOCK, peft_version=version)
    assert load_adapter(tmp_path, BLOCK, ALL, SIZES, interleaved=interleaved).down is not None


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize("interleaved", [False, True])
def test_folders_with_modules_of_single_experts(tmp_path, names, interleaved):
    adapter_models.save_single(tmp_path, FACTORS, BLOCK, names, E)
    (a, b), down = load_adapter(tmp_path, BLOCK, [3, 1], SIZES, interleaved=interleaved)
    if interleaved:
        b = torch.cat([b[:, 0::2], b[:, 1::2]], dim=1)
    for name, (low, high) in {"gate_up": (a, b), "down": down}.items():
        torch.testing.assert_close(
            high.double() @ low.double(), adapter_models.delta(FACTORS, name, E, 2.0)[[3, 1]]
        )


@pytest.mark.parametrize(
    ("patterns", "r", "scaling"),
    [
        (
            {"rank_pattern": {"experts.gate_up_proj": 4, "experts.down_proj": 4}, "r": 64},
            64,
            (2.0, 2.0),
        ),
        ({"alpha_pattern": {"mlp.experts.down_proj": 2}}, 4, (2.0, 0.5)),
        ({"alpha_pattern": {"down_proj": 2, ".*gate_up_proj": 4.0}}, 4, (1.0, 0.5)),
        ({"alpha_pattern": {"proj": 2, "model.layers.1.*": 1}}, 4, (2.0, 2.0)),
    ],
)
def test_patterns_of_peft(tmp_path, patterns, r, scaling):
    """They match the end of the name of a parameter, as PEFT's `get_pattern_key` does."""
    adapter_models.save(tmp_path, FACTORS, BLOCK, **{"r": r} | patterns)
    adapter = load_adapter(tmp_path, BLOCK, ALL, SIZES)
    for (name, (a, b)), by in zip(adapter._asdict().items(), scaling, strict=True):
        torch.testing.assert_close(
            b.double() @ a.double(), adapter_models.delta(FACTORS, name, E, by)
        )


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"use_dora": True}, "`use_dora` is set, but adapters are plain LoRA"),
        ({"alora_invocation_tokens": [1]}, "`alora_invocation_tokens` is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "`init_lora_weights` is set"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
        ({"r": 4.0}, "cannot be read"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"x": None}}, "alpha_pattern"),
    ],
)
def test_configs_that_are_refused(tmp_path, config, says):
    adapter_models.save(tmp_path, FACTORS, BLOCK, **config)
    with pytest.raises(ValueError, match=rf"(?s)adapter_config.json: .*{says}"):
        load_adapter(tmp_path, BLOCK, ALL, SIZES)


@pytest.mark.parametrize(
    ("name", "experts_only"),
    [
        ("gate.lora_A.weight", True),
        ("gate.weight", True),  # of `modules_to_save`
        ("router.lora_B.weight", True),
        ("shared_experts.up_proj.lora_A.weight", False),
        ("../self_attn.q_proj.lora_A.weight", False),
    ],
)
def test_parts_that_nobody_serves(tmp_path, name, experts_only):
    """The router's are of no use to the host either, since the layer has it."""
    name = (
        f"base_model.model.{BLOCK.removesuffix('mlp')}{name[3:]}"
        if name[0] == "."
        else f"{BLOCK}.{name}"
    )
    adapter_models.save(tmp_path, FACTORS, BLOCK, others={name: randn(4, 4)})
    with pytest.raises(
        ValueError, match=f"adapter_model.safetensors: .*parts that are not served: {name}"
    ):
        load_adapter(tmp_path, BLOCK, ALL, SIZES, experts_only=experts_only)
    # With `experts_only` the part is left out, as if it had never been there.
    if not experts_only:
        plain = tmp_path / "plain"
        adapter_models.save(plain, FACTORS, BLOCK)
        got, want = (
            load_adapter(path, BLOCK, ALL, SIZES, experts_only=True) for path in (tmp_path, plain)
        )
        assert all(torch.equal(*pair) for pair in zip(chain(*got), chain(*want), strict=True))


def test_files_that_are_refused(tmp_path):
    """Each message names the file or the tensor."""

    def refused(says: str, sizes: tuple[int, ...] = SIZES, block: str = BLOCK) -> None:
        with pytest.raises(ValueError, match=says):
            load_adapter(tmp_path, block, ALL, sizes)

    # No config, and configs that are none.
    config = tmp_path / "adapter_config.json"
    file = tmp_path / "adapter_model.safetensors"
    refused("adapter_config.json: cannot be read")
    for text in ("", "[]", "{", "null", "\xff"):
        config.write_bytes(text.encode("latin-1"))
        refused("adapter_config.json: cannot be read")

    # Factors of another layer, and of experts of other sizes.
    adapter_models.save(tmp_path, FACTORS, BLOCK)
    refused(
        "nothing for `model.layers.1.mlp.experts`; of experts it has: base_model",
        block="model.layers.1.mlp",
    )
    # Of 2·E experts it would be r = 2.
    for sizes in (
        (3, D, 2 * F, F),
        (E, 2 * D, 2 * F, F),
        (2 * E, D, 2 * F, F),
    ):
        refused(
            r"lora_A.weight \[.·r, k\] and lora_B.weight .* for r = 4 .* got lora_A.weight float32",
            sizes,
        )

    # A factor of another dtype, too few factors, and too many.
    adapter_models.save(tmp_path, FACTORS, BLOCK, torch.int32)
    refused("got lora_A.weight int32")
    adapter_models.save(
        tmp_path, {name: value for name, value in FACTORS.items() if name != "down.lora_B"}, BLOCK
    )
    refused(r"got lora_A.weight float32 \[16, 32\]")
    adapter_models.save(
        tmp_path, FACTORS, BLOCK, others={f"{BLOCK}.experts.lora_A.weight": randn(16, 32)}
    )
    refused("`model.layers.0.mlp.experts` must have")
    adapter_models.save(
        tmp_path, FACTORS, BLOCK, others={f"base_model.model.{BLOCK}.experts.lora_B.bias": randn(D)}
    )
    refused("lora_B.bias float32")
    inner = f"base_model.model.{BLOCK}.experts.base_layer.base_layer"
    again = {
        f"{inner}.{name[5:]}.weight": value.clone()
        for name, value in FACTORS.items()
        if "down" in name
    }
    adapter_models.save(tmp_path, FACTORS, BLOCK, others=again)
    refused("`model.layers.0.mlp.experts` has two adapters of the shape")

    # Modules of single experts: another number of them, and other sizes.
    adapter_models.save_single(tmp_path, FACTORS, BLOCK, ("gate_proj", "up_proj", "down_proj"), E)
    refused("none of 3 experts'", (3, D, 2 * F, F))
    refused(r"lora_A.weight \[r, k\] .* for r = 4 and n, k = 64, 16, got", (E, D, F, F // 2))

    # A file that is cut off, empty or absent.
    file.write_bytes(file.read_bytes()[:-8])
    refused("adapter_model.safetensors: cannot be read")
    file.write_bytes(b"")
    refused("adapter_model.safetensors: cannot be read")
    file.unlink()
    refused("adapter_model.safetensors: cannot be read")


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_a_layer_of_either_mode_takes_adapters_in_either(ep, made, written):
    """And still does when it was cast, copied, or has lost its adapters."""
    adapter = adapter_models.adapter_of(FACTORS, E, ALL, 2.0)
    # A layer, one that was cast, and a copy that has lost its adapters.
    with torch.inference_mode(made):
        layer = layer_of(ep)
        cast = layer_of(ep).double().float()
        copied = copy.deepcopy(layer.adapters)
        copied.regroup(E, whole=False)
    with torch.inference_mode(written), torch.no_grad():
        for each in (layer, cast):
            each.put_adapter(0, adapter)
            each.put_adapter(0, None)
        copied.put_local(1, adapter)
        copied.clear_local(1)
        copied.regroup(E, whole=False)
