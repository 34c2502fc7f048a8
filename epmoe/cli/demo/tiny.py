"""The tiny models of `epmoe run --model`: architectures of transformers in shapes so small that a
CPU generates text in seconds.

Each has 24 experts, which 2, 3, 4, 6, 8, 12 and 24 ranks divide evenly.
"""

from __future__ import annotations

from typing import Any

# The number of tokens that a model knows.
VOCABULARY = 240
# The keys that all models have.
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 24,
    "num_key_value_heads": 12,
    "head_dim": 8,
    "intermediate_size": 96,
    # So large that the experts influence which token comes next.
    "initializer_range": 0.1,
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
"""The config of each model, by the name of its architecture in transformers. The keys are those of
the architecture's config class.
"""
