"""Which heads a layout can hold, and why not others.

Imports no JAX, since training tells which engines can run its heads, and `convert --help` shows the table.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from medusa_jax.arch import LlamaConfig


def accepted(heads: Any, llama: LlamaConfig | None) -> str:
    """Accept all heads."""
    return ""


@dataclass(frozen=True)
class Limits:
    """Which heads a layout can hold.

    Attributes:
      drafters: their kinds; None: all.
      draft_vocab: it can store which tokens the heads score.
      why_not: the reason why heads of these kinds (a complete configuration) cannot be stored; "" if they can. The shape
        of their backbone may be None, which skips the checks that depend on it.
    """

    drafters: tuple[str, ...] | None
    draft_vocab: bool = False
    why_not: Callable[[Any, LlamaConfig | None], str] = accepted

    def holds(self, drafter: str) -> bool:
        """Whether the layout can store heads of a kind."""
        return self.drafters is None or drafter in self.drafters


def hydra(heads: Any, llama: LlamaConfig | None) -> str:
    """Layers 2 to n are one module in the authors' code, and LM heads are separate."""
    if heads.n_layers > 2 and not heads.tie_layers:
        return "Hydra's code runs one layer for layers 2 to n, heads.tie_layers is false"
    if heads.lm_head == "shared" or heads.skip == "fixed" or not heads.lm_bias:
        return (
            "Hydra's code needs separate LM heads with biases and a learned skip connection, not "
            f"lm_head {heads.lm_head!r}, lm_bias {heads.lm_bias}, skip {heads.skip!r}"
        )
    return _without_factor("Hydra's code", llama)


def eagle(heads: Any, llama: LlamaConfig | None) -> str:
    """The layout has no key for an LM head."""
    if heads.lm_head == "shared":
        return ""
    return (
        f"EAGLE-1 heads score by the model's LM head, these have LM head {heads.lm_head!r}"
    )


def eagle_for_sglang(heads: Any, llama: LlamaConfig | None) -> str:
    """SGLang's layers are those of a Llama or Qwen2."""
    reason = eagle(heads, llama) or _unknown_layers("sglang", llama)
    return reason or _without_factor("sglang", llama)


def eagle_for_vllm(heads: Any, llama: LlamaConfig | None) -> str:
    """vLLM's layers are those of a Llama, without a bias after fc."""
    reason = eagle(heads, llama)
    if not reason and heads.fc_bias:
        return "vLLM drops the bias after EAGLE's fc without a warning: train with heads.fc_bias=False"
    reason = reason or _unknown_layers("vllm", llama)
    if not reason and llama is not None and llama.qkv_bias:
        return (
            "vLLM's EAGLE-1 has the layers of a Llama, these have q/k/v biases: --to sglang"
        )
    return reason


def _unknown_layers(engine: str, llama: LlamaConfig | None) -> str:
    """Why an engine has no layers like the backbone's; "" if it may have."""
    if llama is None or not (llama.qk_norm or llama.mlp_bias or llama.out_bias):
        return ""
    return f"{engine}'s EAGLE-1 has layers without q/k norms and biases of outputs or MLPs"


def _without_factor(engine: str, llama: LlamaConfig | None) -> str:
    """Why heads cannot read the embedding that an engine shares with the model; "" if they can."""
    if llama is None or (factor := llama.embedding_multiplier) == 1:
        return ""
    return f"{engine} gives heads the model's embedding without its factor {factor:g}"


def eagle3_in_speculators(heads: Any, llama: LlamaConfig | None) -> str:
    """Any layers that read streams in order, with one LM head."""
    if heads.lm_head == "low_rank":
        return "EAGLE-3 files cannot store low-rank LM heads"
    return _out_of_order(heads, llama)


def _out_of_order(heads: Any, llama: LlamaConfig | None) -> str:
    """Whether vLLM, which sorts tapped layers, misreads these."""
    taps = [int(tap) for tap in heads.tap_layers.split(",") if tap]
    taps = [*_taps(heads, llama)] if llama else taps
    if taps == sorted({*taps}):
        return ""
    return f"vLLM reads each tapped layer once, in order, not {taps}"


def _taps(heads: Any, llama: LlamaConfig) -> tuple[int, ...]:
    """The tapped layers, set or the paper's."""
    from medusa_jax.heads.registry import make_drafter  # which imports JAX

    return make_drafter(heads, llama).taps


def eagle3(heads: Any, llama: LlamaConfig | None) -> str:
    """One layer, which reads the streams of the paper."""
    if heads.n_layers != 1:
        return f"--to eagle3 holds one layer, not {heads.n_layers}: --to speculators"
    reason = eagle3_in_speculators(heads, llama)
    if reason or llama is None:
        return reason
    taps, paper = _taps(heads, llama), _taps(replace(heads, tap_layers=""), llama)
    if taps == paper:
        return ""
    return (
        f"--to eagle3 is for the paper's tapped layers {paper}, not {taps}, since engines do not "
        "agree on how it would say others: --to speculators"
    )


def dflash(heads: Any, llama: LlamaConfig | None) -> str:
    """DFlash or DSpark as published, with the backbone's LM head."""
    if heads.draft_vocab:
        return f"--to dflash scores all tokens, not the {heads.draft_vocab} of heads.draft_vocab"
    if heads.lm_head != "shared":
        return f"--to dflash scores by the model's LM head, not by {heads.lm_head!r}"
    if heads.markov_rank and not heads.root_guesses:
        return "--to dflash cannot say that DSpark's root does not guess: --to speculators"
    if heads.window and heads.window_at_root:
        return "--to dflash counts windows from each slot, these are from the root: --to speculators"
    return _out_of_order(heads, llama) or _without_factor("vLLM, by --to dflash,", llama)


def dflash_in_speculators(heads: Any, llama: LlamaConfig | None) -> str:
    """Any but low-rank LM heads, windows from each slot and causal layers without a window."""
    if heads.lm_head == "low_rank":
        return "--to speculators cannot store low-rank LM heads"
    if heads.causal == "all" or (heads.window and not heads.window_at_root):
        return (
            "in speculators only layers with a window from the root are causal: --to dflash"
        )
    return _out_of_order(heads, llama)
