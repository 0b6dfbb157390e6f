"""Shapes of models and heads, and the types that they are computed and stored in.

`LlamaConfig` and `HeadsConfig` are hashable, so they can be attributes of Flax modules and static arguments of
`jax.jit`. They are mutable for recipes and the command line of a training, which assign to their fields before they
are used; nothing else may.
"""

from dataclasses import dataclass, replace
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
ACTIVATION_BITS = (16, 8)
DRAFT_WEIGHTS = WEIGHTS[1:]
# Scalings of the rotation, and activations of the MLP.
ROPE_SCALINGS = ("none", "linear", "dynamic", "llama3", "yarn", "longrope")
MLP_ACTIVATIONS = ("silu", "gelu_tanh", "relu2")
Above0 = Annotated[float, AtLeast(1e-30)]
# Fields that make layers unlike Llama's; in the layers of drafters they have their defaults.
UNLIKE_LLAMA = (
    "rope_dim", "rope_window_theta", "rotated_layers", "sliding_window", "window_layers", "qk_norm_full",
    "qk_norm_late", "pre_norm", "post_norm", "activation", "gated_mlp", "embedding_multiplier", "residual_multiplier",
    "logit_divisor", "attention_multiplier", "query_growth",
)  # fmt: skip


@dataclass(unsafe_hash=True)
class LlamaConfig:
    """Shape of a Llama-like backbone: the defaults are Llama's, other families change fields (`files/families.py`).

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
    # "none", "dynamic" (none within the context), or one that the fields below describe.
    rope_scaling: Annotated[str, OneOf(ROPE_SCALINGS)] = "none"
    rope_factor: Above0 = 1.0
    # Turns in the original context: planes with fewer are divided, with more kept (YaRN's beta_slow, beta_fast).
    rope_low_freq_factor: Above0 = 1.0
    rope_high_freq_factor: Above0 = 4.0
    rope_original_max_position: Annotated[int, AtLeast(1)] = 8192
    # YaRN, LongRoPE: the factor of cos and sin. YaRN: whether its ramp starts and ends at whole planes.
    rope_attention_factor: Above0 = 1.0
    rope_truncate: bool = True
    # LongRoPE: divisors of the frequencies if `max_position` is within the original context, and if it is longer.
    rope_short: tuple[float, ...] = ()
    rope_long: tuple[float, ...] = ()
    # Components of a head that are rotated: planes (i, i + head_dim / 2) for i below half of it; 0: all.
    rope_dim: int = 0
    # The base, without scaling, of layers with the window; 0: they rotate like the others.
    rope_window_theta: float = 0.0
    # Whether each layer rotates queries and keys; empty: all do.
    rotated_layers: tuple[bool, ...] = ()
    tie_embeddings: bool = False
    # 0 = no window. A query at position p sees keys at positions > p - sliding_window.
    sliding_window: int = 0
    # Whether each layer has the window; empty: all do.
    window_layers: tuple[bool, ...] = ()
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # Queries and keys are normed over all heads at once, not by head.
    qk_norm_full: bool = False
    # Queries and keys are normed after their rotation, not before it.
    qk_norm_late: bool = False
    # Norms before attention and MLP, and of their outputs.
    pre_norm: bool = True
    post_norm: bool = False
    activation: Annotated[str, OneOf(MLP_ACTIVATIONS)] = "silu"
    # down(activation(gate(x)) * up(x)); otherwise down(activation(up(x))).
    gated_mlp: bool = True
    # Embeddings and the outputs of sublayers are multiplied by these; logits are divided by the third.
    embedding_multiplier: Above0 = 1.0
    residual_multiplier: Above0 = 1.0
    logit_divisor: Above0 = 1.0
    # Multiplier of attention's scores; 0: head_dim ** -0.5.
    attention_multiplier: float = 0.0
    # Ministral 3: from rope_original_max_position on, queries grow by this times a logarithm; contexts end there.
    query_growth: float = 0.0

    @property
    def longest(self) -> int:
        """The most that `max_position` may be."""
        if self.rope_scaling != "longrope":
            return self.max_position
        return round(self.rope_factor * self.rope_original_max_position)

    def has_window(self, layer: int) -> bool:
        """Whether a layer sees only the window."""
        has_window = not self.window_layers or self.window_layers[layer]
        return self.sliding_window > 0 and has_window

    def rotation(self, layer: int) -> str:
        """How a layer rotates: "text", "window" or "none"."""
        if self.rotated_layers and not self.rotated_layers[layer]:
            return "none"
        return "window" if self.rope_window_theta and self.has_window(layer) else "text"

    @property
    def query_multiplier(self) -> float:
        """What queries are multiplied by in addition to head_dim ** -0.5."""
        return self.attention_multiplier * self.head_dim**0.5 or 1.0

    def llama_layers(self) -> "LlamaConfig":
        """This shape with plain Llama layers, which drafters use: same sizes, biases and q/k norms."""
        plain = replace(self, **{name: getattr(LlamaConfig, name) for name in UNLIKE_LLAMA})
        is_bounded = self.rope_scaling == "longrope" or self.query_growth
        return plain.unscaled() if is_bounded else plain

    def unscaled(self) -> "LlamaConfig":
        """This shape without a scaling of the rotation."""
        kept = ("rope_theta", "rope_dim", "rope_window_theta")
        scaling = [n for n in vars(self) if n.startswith("rope_") and n not in kept]
        return replace(self, **{name: getattr(LlamaConfig, name) for name in scaling})


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
