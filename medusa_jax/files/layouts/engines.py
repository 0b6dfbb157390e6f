"""Which engine runs which draft heads, by which layout.

`convert` shows `ENGINES`, training asks `engines_for`. `registry.py` has the layouts.
"""

from collections.abc import Mapping

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.files.layouts.registry import layout_of, layouts_of, targets_of
from medusa_jax.heads.names import DRAFTERS

_HYDRA = dict.fromkeys(("hydra", "hydrapp"), ("hydra",))
_BLOCKS = dict.fromkeys(("dflash", "dspark"), ("dflash",))
# Engine -> drafter -> targets that it loads, the most general first.
ENGINES: dict[str, Mapping[str, tuple[str, ...]]] = {
    "medusa_jax": dict.fromkeys(DRAFTERS, ("native",)),
    "vLLM": {"medusa": ("vllm", "tgi"), "eagle": ("vllm",), "eagle3": ("vllm", "eagle3")}
    | dict.fromkeys(_BLOCKS, ("dflash", "speculators")),
    "SGLang": {"eagle": ("sglang",), "eagle3": ("sglang",)} | _BLOCKS,
    "tpu-inference": dict.fromkeys(("eagle3", "dflash"), ("tpu_inference",)),
    "sglang-jax": dict.fromkeys(("eagle3", "dflash", "dspark"), ("sglang_jax",)),
    "TGI": {"medusa": ("tgi",)},
    "TensorRT-LLM": {"eagle3": ("eagle3",)},
    "llama.cpp": {"eagle3": ("eagle3",)},
    "OpenVINO": {"eagle3": ("eagle3",)},
    "the authors' code": {"eagle": ("eagle",), "eagle3": ("eagle3",)} | _HYDRA | _BLOCKS,
}


def engines_for(
    heads: HeadsConfig, llama: LlamaConfig | None
) -> tuple[dict[str, str], dict[str, str]]:
    """The engines that can run such heads, and those that run only others of this family.

    Args:
      llama: the shape of their backbone, on which some layouts depend; None skips these checks.

    Returns: ({engine: the target to convert to}, {engine: the reason}).

    Example: Medusa heads with a draft vocabulary and separate LM heads ->
    ({"medusa_jax": "native", "vLLM": "vllm"}, {"TGI": "..."}).
    """
    able, unable = {}, {}
    for name, engine in ENGINES.items():
        targets = engine.get(heads.drafter, ())
        reasons = {target: why_not(heads, target, llama) for target in targets}
        fit = [target for target, reason in reasons.items() if not reason]
        if fit:
            able[name] = fit[0]
        elif reasons:
            unable[name] = reasons[targets[0]]
    return able, unable


def why_not(heads: HeadsConfig, target: str, llama: LlamaConfig | None = None) -> str:
    """The reason why heads cannot be written in a target's layout; "" if they can.

    Args: as for `engines_for`.

    Raises:
      UserError: no such target.
    """
    from medusa_jax.heads.registry import whole_config  # which imports JAX

    heads = whole_config(heads)
    layout, targets = layout_of(target, heads.drafter), targets_of(heads.drafter)
    if layout is None:
        kinds, fit = ", ".join(layouts_of(target)), ", ".join(targets)
        return (
            f"--to {target} is for {kinds} heads, not {heads.drafter} (these: --to {fit})"
        )
    if reason := layout.why_not(heads, llama):
        return reason
    # Heads that share the backbone's LM head can score all tokens.
    if heads.draft_vocab and heads.lm_head != "shared" and not layout.draft_vocab:
        layouts = {name: layout_of(name, heads.drafter) for name in targets}
        able = ", ".join(name for name, row in layouts.items() if row and row.draft_vocab)
        return (
            f"--to {target} cannot name the {heads.draft_vocab} tokens of a draft vocabulary, as only "
            f"--to {able} can (heads.lm_head 'shared' or heads.draft_vocab 0 avoids it)"
        )
    return ""
