"""What the layers of a family have that Llama's lack, in two or three tiny layers each."""

from tiny import tiny_arch

OLMO = {"pre_norm": False, "post_norm": True, "qk_norm": True}
SHAPES = {
    "smollm3": {"rotated_layers": (True, False)},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4}
    | {"attention_multiplier": 0.6, "logit_divisor": 0.7},
    "phi3": {"rope_dim": 4, "rope_scaling": "longrope", "rope_attention_factor": 1.2}
    | {
        "rope_short": (1.0, 1.5),
        "rope_long": (2.0, 9.0),
        "rope_original_max_position": 512,
    },
    "hunyuan": {"qk_norm": True, "qk_norm_late": True},
    "olmo3": OLMO
    | {"qk_norm_full": True, "sliding_window": 3, "window_layers": (True, False)}
    | {"rope_scaling": "linear", "rope_factor": 2.0, "rope_window_theta": 50.0},
    "exaone4": OLMO
    | {
        "sliding_window": 4,
        "window_layers": (True, False),
        "rotated_layers": (True, False),
    },
    "arcee": {"activation": "relu2", "gated_mlp": False, "mlp_bias": True},
    "gemma3": {
        "qk_norm": True,
        "post_norm": True,
        "activation": "gelu_tanh",
        "sliding_window": 3,
    }
    | {
        "window_layers": (True, False),
        "rope_window_theta": 50.0,
        "embedding_multiplier": 4.0,
    }
    | {"tie_embeddings": True},
}


def tiny_shape(name, **fields):
    """`tiny_arch` of a family's shape."""
    return tiny_arch(**SHAPES[name] | fields)
