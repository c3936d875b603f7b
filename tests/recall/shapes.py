"""The recall models' configs: small models of three families, heads of 64 in all of them."""

from __future__ import annotations

from typing import Any

from recall.task import BOS, ECHO_DISTANCE, PAD, VOCABULARY

_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": BOS,
    "pad_token_id": PAD,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "full": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "hidden_act": "silu",
    },
    "hybrid": {
        **_COMMON,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attention_bias": False,
        "attention_multiplier": 0.125,
        "embedding_multiplier": 4.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "position_embedding_type": "rope",
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    "sliding": {
        **_COMMON,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        # Two layers with a window, then a global one; an echo is the oldest token in the window.
        "sliding_window": ECHO_DISTANCE,
        "sliding_window_pattern": 3,
    },
}

MARKED = frozenset({"hybrid"})
"""The models whose prompts hold marks."""
