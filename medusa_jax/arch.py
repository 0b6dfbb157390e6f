"""Shapes of models and heads, and the types that they are computed and stored in.

`LlamaConfig` and `HeadsConfig` are hashable, so they can be attributes of Flax modules and static arguments of
`jax.jit`. They are mutable only because the command line of a training overrides fields in place; nothing
else may assign to them.
"""

from dataclasses import dataclass
from typing import Annotated

from medusa_jax.bounds import AtLeast, OneOf

# Thresholds of typical acceptance: hard, and of entropy (Medusa 2.3.1).
EPSILON, DELTA = 0.09, 0.3
# Types to compute in.
DTYPES = ("float64", "float32", "bfloat16", "float16")
# Types to store kernels in: of the backbone ("stored": the blocks of a GGUF file), and of draft heads.
STORED = "stored"
WEIGHTS = (STORED, "float32", "bfloat16", "int8")
# Bits of activations that native products with integers take.
ACTIVATIONS = (16, 8)
DRAFT_WEIGHTS = WEIGHTS[1:]


@dataclass(unsafe_hash=True)
class LlamaConfig:
    """Shape of a Llama-family backbone (Llama, Mistral, Qwen2, Qwen3).

    Fields have the meaning of the Hugging Face config they are read from.
    """

    vocab_size: Annotated[int, AtLeast(1)] = 32000
    d_model: Annotated[int, AtLeast(1)] = 4096
    n_layers: Annotated[int, AtLeast(1)] = 32
    n_heads: Annotated[int, AtLeast(1)] = 32
    n_kv_heads: Annotated[int, AtLeast(1)] = 32
    head_dim: Annotated[int, AtLeast(1)] = 128
    d_ff: Annotated[int, AtLeast(1)] = 11008
    max_position: Annotated[int, AtLeast(1)] = 4096
    rms_eps: float = 1e-5
    rope_theta: Annotated[float, AtLeast(1)] = 10000.0
    # "none", "linear", "dynamic" (none within the context), "llama3" or "yarn"; the fields below matter for these.
    rope_scaling: Annotated[str, OneOf(("none", "linear", "dynamic", "llama3", "yarn"))] = (
        "none"
    )
    rope_factor: float = 1.0
    # Turns in the original context: planes with fewer are divided, with more kept (YaRN's beta_slow, beta_fast).
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_position: int = 8192
    # YaRN: the factor of cos and sin, and whether its ramp starts and ends at whole planes.
    rope_attention_factor: float = 1.0
    rope_truncate: bool = True
    tie_embeddings: bool = False
    # 0 = no window. A query at position p sees keys at positions > p - sliding_window.
    sliding_window: int = 0
    # Index of the first layer that uses the window (Qwen2's max_window_layers).
    sliding_window_start_layer: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(unsafe_hash=True)
class HeadsConfig:
    """A set of draft heads."""

    # The family; each adds its own fields (`medusa_jax/heads/`).
    drafter: str = "medusa"
    # Heads: the number of tokens that are guessed after the next one.
    n_heads: int = 5
    # Layers of each head, or of the layers that all heads share.
    n_layers: int = 1
    # Where a head's logits come from: "own" (a full D x V matrix per head, as in the paper), "shared" (the backbone's
    # LM head) or "low_rank" (D x rank x V per head).
    lm_head: str = "own"
    # Rank of low-rank LM heads.
    rank: int = 256
    # How many tokens a head scores, the most frequent ones (`heads/vocabulary.py`); 0 = all.
    draft_vocab: int = 0
