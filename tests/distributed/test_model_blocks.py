"""MoE blocks of transformers over all ranks: what `EPConfig.from_hf` says of a model holds for its spread experts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from helpers import randn, slow

import epmoe

pytest.importorskip("transformers")

from moe_blocks import D, T, behind, beside, block_of, outputs, save, variants

pytestmark = pytest.mark.usefixtures("serving")


@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", "gpt_oss", "mistral4", slow("qwen2_moe"), slow("lfm2_moe"), slow("llama4_text")]
)
def test_a_block_over_ranks_is_the_block_of_transformers(model_type: str, rank: int, size: int) -> None:
    for number, hf in enumerate(variants(model_type)):
        block = block_of(hf)
        config = epmoe.EPConfig.from_hf(hf, ep_size=size)
        with tempfile.TemporaryDirectory() as mine, epmoe.ExpertParallel(config, device="cpu") as ep:
            name = save(block, model_type, Path(mine))
            folder = epmoe.SafetensorsFolder(mine)
            layer = epmoe.MoELayer.from_safetensors(ep, folder, name, shared=beside(block)[1])
            x = randn(T, D, seed=10 * number + rank)
            real = T - 5 * rank
            y = layer(x, real)
            want = outputs(block, x[:real])
            assert (behind(block)[1](y[:real]) - want).norm() <= 1e-6 * want.norm()
            assert not y[real:].any()
