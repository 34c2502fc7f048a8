"""Tiny MoE models for `epmoe run --model`: the shapes that architectures of transformers get here.

The 24 experts divide over 2, 3, 4, 6, 8, 12 and 24 ranks.
"""

from __future__ import annotations

from typing import Any

VOCABULARY = 240
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 24,
    "num_key_value_heads": 12,
    "head_dim": 8,
    "intermediate_size": 96,
    "initializer_range": 0.1,  # large enough for the experts to influence which token comes next
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **_SHAPE,
        "num_experts": 24,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 48,
    },
    "mixtral": {**_SHAPE, "num_local_experts": 24, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **_SHAPE,
        "num_key_value_heads": 24,
        "n_routed_experts": 24,
        "num_experts_per_tok": 6,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gpt_oss": {**_SHAPE, "num_local_experts": 24, "num_experts_per_tok": 4, "sliding_window": 16},
}
"""Keys of an architecture's own config class, by its name."""
