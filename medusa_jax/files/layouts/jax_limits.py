"""Which heads tpu-inference and sglang-jax compute as we do, and why not others.

Both ignore fields that they do not know, without a word, so that these must say what the engine computes anyway.
Imports no JAX at the start, like `limits.py`.
"""

from typing import Any

from medusa_jax.arch import LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.files.layouts import limits

TPU, SGLANG = "tpu-inference", "sglang-jax"
# The base by which tpu-inference rotates DFlash's layers.
THETA = 10.0**6
Faults = list[tuple[bool, str]]


def eagle3(engine: str, heads: Any, llama: LlamaConfig | None) -> str:
    """One layer without EAGLE-3.1's additions, which reads the streams of the paper."""
    unread = engine == SGLANG and heads.norm_before_residual
    faults: Faults = [
        (heads.n_layers != 1, f"runs one layer, not {heads.n_layers}"),
        (heads.fc_norm, "has no norms before fc (heads.fc_norm)"),
        (heads.norm_output, "ignores norm_output"),
        (unread, "ignores norm_before_residual"),
    ]
    if llama is not None:
        shape, taps = _shape_and_taps(heads, llama)
        L, scaling = llama.n_layers, shape.rope_scaling
        paper = (2, L // 2, L - 3)
        faults += [
            (L < 7, f"reads three different layers, of which a model of {L} has fewer"),
            (taps != paper, f"reads the layers {paper}, whatever a file says, not {taps}"),
            (scaling not in ("none", "llama3"), f"misreads the rotation's {scaling!r}"),
        ]
    reason = _first(engine, faults, heads, llama)
    return reason or limits.eagle3_in_speculators(heads, llama)


def blocks(engine: str, heads: Any, llama: LlamaConfig | None) -> str:
    """DFlash, in sglang-jax DSpark too, whose layers see all of the text and of the block."""
    rank, narrow, own = heads.markov_rank, heads.draft_vocab, heads.lm_head != "shared"
    faults: Faults = [
        (narrow, f"scores all tokens, not the {narrow} of heads.draft_vocab"),
        (own, f"scores by the model's LM head, not by {heads.lm_head!r}"),
        (heads.window, f"ignores windows (heads.window {heads.window})"),
        (heads.causal == "all", "lets a slot see all others, not those before it alone"),
        (engine == TPU and rank, f"has no Markov head (heads.markov_rank {rank})"),
        (heads.root_guesses and not rank, "drops the guess of the root's slot"),
        (rank and not heads.root_guesses, "lets the root's slot of DSpark guess"),
    ]
    if llama is not None:
        shape, taps = _shape_and_taps(heads, llama)
        theta, scaling, size = shape.rope_theta, shape.rope_scaling, shape.head_dim
        # The stream before the first layer, or after the last one.
        missing = 0 if engine == TPU else llama.n_layers
        other = engine == TPU and theta != THETA
        padded = engine == TPU and size != 64 and size % 128 != 0
        faults += [
            (scaling != "none", f"ignores the scaling {scaling!r} of DFlash's rotation"),
            (other, f"rotates DFlash by 10^6, whatever a file says, not by {theta:g}"),
            (padded, f"norms DFlash's queries and keys with padding, of head_dim {size}"),
            (missing in taps, f"does not tap stream {missing} (heads.tap_layers)"),
            ([*taps] != sorted({*taps}), f"reads each layer once, in order, not {taps}"),
        ]
    return _first(engine, faults, heads, llama)


def unknown_model(engine: str, drafter: str, architectures: list[str]) -> str:
    """The reason why an engine runs no such heads with a model; "" if it does."""
    known = ["LlamaForCausalLM", "Qwen3ForCausalLM"]
    if engine == TPU and drafter == "eagle3":
        known = known[:1]
    if not {*known}.isdisjoint(architectures):
        return ""
    return (
        f"{engine} gives {drafter} heads the inner streams of {' and '.join(known)} only, not of "
        f"{', '.join(architectures) or 'a model of this shape'}"
    )


def _first(engine: str, faults: Faults, heads: Any, llama: LlamaConfig | None) -> str:
    """The first reason that holds, those of the model last."""
    for holds, reason in faults:
        if holds:
            return f"{engine} {reason}"
    if llama is None:
        return ""
    if engine == TPU and heads.head_dim not in (0, llama.head_dim):
        return f"{engine} pads heads as the model's {llama.head_dim}, not {heads.head_dim}"
    from medusa_jax.files.hf_writer import config_to_hf  # which imports JAX

    try:
        architectures = config_to_hf(llama)["architectures"]
    except UserError:
        architectures = []
    return unknown_model(engine, heads.drafter, architectures)


def _shape_and_taps(heads: Any, llama: LlamaConfig) -> tuple[LlamaConfig, tuple[int, ...]]:
    from medusa_jax.heads.registry import make_drafter  # which imports JAX

    drafter: Any = make_drafter(heads, llama.llama_layers())
    return drafter.shape, drafter.taps
