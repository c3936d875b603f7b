"""Small configs of mlx-lm's model classes, one for each way of using a cache. Data only.

``CONFIGS`` has for each family the name of mlx-lm's module and the arguments of its ``ModelArgs``.
"""

from __future__ import annotations

from typing import Any

VOCABULARY = 512
WINDOW = 24  # of the families with a sliding window, and the chunk of llama4

Config = dict[str, Any]
_SIZES: Config = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
}
_COMMON: Config = {**_SIZES, "rms_norm_eps": 1e-5}
_ONE_HEAD: Config = {"num_key_value_heads": 1, "head_dim": 64}
_GEMMA: Config = {**_COMMON, "head_dim": 64, "query_pre_attn_scalar": 64.0}
_MIXED: list[str] = ["sliding_attention", "full_attention"]
_MOE: Config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA: Config = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_LATENT: Config = {
    "num_key_value_heads": 2,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "rope_theta": 1e4,
    "routed_scaling_factor": 1.0,
    "n_routed_experts": 4,
}
_DEEPSEEK: Config = {
    **_COMMON,
    **_LATENT,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_SHARED: Config = {
    **_COMMON,
    **_ONE_HEAD,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": _MIXED * 3,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 32,
    "final_logit_softcapping": 30.0,
}
_LLAMA4: Config = {
    **_COMMON,
    **_ONE_HEAD,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 128,
    "rope_theta": 1e4,
    "use_qk_norm": True,
}
CONFIGS: dict[str, tuple[str, Config]] = {
    "llama": ("llama", {**_COMMON, **_ONE_HEAD, "tie_word_embeddings": False}),
    "mistral": ("llama", {**_COMMON, "num_key_value_heads": 2, "head_dim": 32}),
    "qwen2": ("qwen2", {**_COMMON, "num_key_value_heads": 2}),
    "qwen3": (
        "qwen3",
        {**_COMMON, **_ONE_HEAD, "rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    "phi3": ("phi3", {**_COMMON, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", {**_GEMMA, "num_key_value_heads": 1, "attn_logit_softcapping": 5.0}),
    "gemma2_mha": ("gemma2", {**_GEMMA, "num_key_value_heads": 2, "attn_logit_softcapping": 5.0}),
    "gemma3_text": (
        "gemma3_text",
        {
            **_GEMMA,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_COMMON,
            **_ONE_HEAD,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
        },
    ),
    "cohere2": (
        "cohere2",
        {
            **_SIZES,
            **_ONE_HEAD,
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
        },
    ),
    "olmo3": (
        "olmo3",
        {
            **_COMMON,
            **_ONE_HEAD,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "rope_theta": 1e4,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_COMMON,
            **_ONE_HEAD,
            **_DELTA,
            **_MOE,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [0],
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    ),
    "qwen3_5": (
        "qwen3_5",
        {"text_config": {**_COMMON, **_ONE_HEAD, **_DELTA, "model_type": "qwen3_5_text"}},
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **_COMMON,
            **_ONE_HEAD,
            **dict.fromkeys(("mamba_d_head", "mamba_d_state"), 32),
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "ssm_multipliers": [1.0] * 5,
            **dict.fromkeys(("ssm_out_multiplier", "key_multiplier", "lm_head_multiplier"), 1.0),
        },
    ),
    "lfm2": (
        "lfm2",
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "norm_eps": 1e-5,
            **dict.fromkeys(("conv_bias", "block_auto_adjust_ff_dim"), False),
            "conv_L_cache": 3,
            **dict.fromkeys(("block_dim", "block_ff_dim"), 128),
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "full_attn_idxs": [1, 3],
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_COMMON,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            **dict.fromkeys(("attention_bias", "mamba_proj_bias"), False),
            **dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0),
            "attention_multiplier": 0.125,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "mamba_n_heads": 4,
            **dict.fromkeys(("mamba_d_head", "mamba_d_state"), 32),
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_conv_bias": True,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_SIZES,
            **_ONE_HEAD,
            **dict.fromkeys(("attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias"), False),
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 32,
            "conv_kernel": 4,
            "n_groups": 1,
            "layer_norm_epsilon": 1e-5,
            "use_conv_bias": True,
            "hybrid_override_pattern": list("M*-M*"),
        },
    ),
    "mamba2": (
        "mamba2",
        {
            **dict.fromkeys(("num_heads", "conv_kernel"), 4),
            **dict.fromkeys(("head_dim", "state_size"), 32),
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "layer_norm_epsilon": 1e-5,
            "n_groups": 1,
            **dict.fromkeys(("use_bias", "tie_word_embeddings"), False),
            "use_conv_bias": True,
            "time_step_limit": (0.0, 100.0),
            "time_step_rank": "auto",
        },
    ),
    "rwkv7": (
        "rwkv7",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "norm_eps": 1e-5,
            "head_dim": 32,
            "num_hidden_layers": 2,
            **{f"{name}_low_rank_dim": 16 for name in ("a", "v", "gate", "decay")},
        },
    ),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "deepseek_v32": (
        "deepseek_v32",
        {**_DEEPSEEK, "index_head_dim": 64, "index_n_heads": 2, "index_topk": 16},
    ),
    "longcat_flash": (
        "longcat_flash",
        {
            **_COMMON,
            **_LATENT,
            "attention_method": "MLA",
            "zero_expert_type": "identity",
            "zero_expert_num": 1,
            "ffn_hidden_size": 128,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 32,
            "num_layers": 2,
            **dict.fromkeys(("mla_scale_q_lora", "mla_scale_kv_lora"), True),
            "attention_bias": False,
        },
    ),
    "gemma3n": (
        "gemma3n",
        {
            "text_config": {
                **_SHARED,
                "model_type": "gemma3n_text",
                "rope_local_base_freq": 1e4,
                "rope_theta": 1e6,
                "activation_sparsity_pattern": [0.5] + [0.0] * 5,
                "altup_num_inputs": 2,
                "altup_coef_clip": 120.0,
                "altup_correct_scale": True,
                "altup_active_idx": 0,
                "laurel_rank": 16,
            }
        },
    ),
    "gemma4_text": ("gemma4_text", {**_SHARED, "global_head_dim": 128}),
    "llama4_text": (
        "llama4_text",
        {
            **_LLAMA4,
            "use_qk_norm": False,
            "tie_word_embeddings": False,
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    "llama4": (
        "llama4",
        {
            "text_config": {
                **_LLAMA4,
                "model_type": "llama4_text",
                "attention_bias": False,
                "attention_chunk_size": WINDOW,
                "interleave_moe_layer_step": 2,
                "num_experts_per_tok": 1,
                "num_local_experts": 4,
                "rope_scaling": None,
                "floor_scale": 16,
            }
        },
    ),
}
