"""Tiny random Llama models: their ``config.json`` and their weights, from a numpy seed.

Used by ``make_golden.py`` and by the tests, imports neither tunix nor torch.
"""

import numpy as np

_SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
}

MODELS = {
    "mha_untied": _SMALL | {"tie_word_embeddings": False, "rope_theta": 10000.0},
    "gqa_tied": _SMALL
    | {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 10000.0},
    "odd_base": _SMALL
    | {
        "num_key_value_heads": 1,
        "head_dim": 12,  # not hidden_size / heads
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
    },
    "llama3_rope": _SMALL
    | {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        },
    },
}
"""``config.json`` of each model, in the forms of transformers 4 and 5."""

SEEDS = {name: 100 + i for i, name in enumerate(MODELS)}


def weights(name: str) -> dict[str, np.ndarray]:
    """Float32 tensors of a model under their Hugging Face names."""
    c = MODELS[name]
    random = np.random.default_rng(SEEDS[name])
    heads, hidden = c["num_attention_heads"], c["hidden_size"]
    width = c.get("head_dim", hidden // heads)
    kv = c.get("num_key_value_heads", heads) * width
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (heads * width, hidden),
            layer + "self_attn.k_proj.weight": (kv, hidden),
            layer + "self_attn.v_proj.weight": (kv, hidden),
            layer + "self_attn.o_proj.weight": (hidden, heads * width),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "mlp.gate_proj.weight": (c["intermediate_size"], hidden),
            layer + "mlp.up_proj.weight": (c["intermediate_size"], hidden),
            layer + "mlp.down_proj.weight": (hidden, c["intermediate_size"]),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not c.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (c["vocab_size"], hidden)
    tensors = {}
    for tensor, shape in shapes.items():
        drawn = random.standard_normal(shape) * (0.3 if len(shape) == 2 else 0.2)
        tensors[tensor] = (drawn + (len(shape) == 1)).astype(np.float32)
    return tensors


def tokens(name: str) -> np.ndarray:
    """Two rows of 40 token ids on which a model's golden values were computed."""
    random = np.random.default_rng(SEEDS[name] + 1000)
    return random.integers(0, MODELS[name]["vocab_size"], (2, 40)).astype(np.int32)
