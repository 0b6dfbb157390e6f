"""Which engine runs which draft heads, by which layout.

`convert` writes by `TARGETS` and shows `ENGINES`, training asks `engines_for`. This file
describes layouts only, without imports of JAX; `export_heads.py` has their writers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.heads.names import DRAFTERS


class Target(NamedTuple):
    """A layout to write.

    Attributes:
      drafters: the heads that it can hold.
      purpose: who reads it.
      loading: how to load {out}, with {heads} heads of {layers} layers of the family {drafter} for the model {base}.
      draft_vocab: the layout can say which tokens the heads score.
      loading_eagle: `loading` of EAGLE-1 heads if it differs.
      instead: drafter -> the target that is written for it.
    """

    drafters: tuple[str, ...]
    purpose: str
    loading: str
    draft_vocab: bool = False
    loading_eagle: str = ""
    instead: Mapping[str, str] = {}


# By the value of --to.
TARGETS = {
    "native": Target(
        tuple(DRAFTERS),
        "this project's format, bound to the model by its fingerprint",
        "`python decode.py --model {base} --drafter {out}`",
        draft_vocab=True,
    ),
    "vllm": Target(
        ("medusa", "eagle", "eagle3"),
        "vLLM: Medusa (any version that has it), EAGLE-1; EAGLE-3 as `speculators`",
        '`speculative_config={{"method": "medusa", "model": "{out}", '
        '"num_speculative_tokens": {heads}}}`. With more tokens than heads, random weights '
        "would draft the rest without a warning",
        draft_vocab=True,
        loading_eagle='`speculative_config={{"method": "eagle", "model": "{out}", '
        '"num_speculative_tokens": {heads}}}`',
        instead={"eagle3": "speculators"},
    ),
    "sglang": Target(
        ("eagle", "eagle3"),
        "SGLang: EAGLE-1; EAGLE-3 as `eagle3`",
        "`--speculative-algorithm EAGLE --speculative-draft-model-path {out}`",
        draft_vocab=True,
        instead={"eagle3": "eagle3"},
    ),
    "tgi": Target(
        ("medusa",),
        "TGI, and vLLM from 0.28 on",
        "TGI: `--model-id {out} --speculate {heads}` (the base model must be in the cache or "
        'a local directory). vLLM from 0.28 on: `speculative_config={{"method": "medusa", "model": '
        '"{out}", "num_speculative_tokens": {heads}}}`',
    ),
    "tgi_shared": Target(
        ("medusa",),
        "TGI, heads that share the model's LM head",
        "TGI: `--model-id {out} --speculate {heads}`",
    ),
    "tensorrt_llm": Target(
        ("medusa",),
        "TensorRT-LLM up to 1.1, and Medusa's own code",
        "TensorRT-LLM up to 1.1: `--medusa_model_dir {out} --num_medusa_heads {heads} "
        "--num_medusa_layers {layers}`",
    ),
    "merged": Target(
        ("medusa",),
        "model and heads as one Hugging Face model (Medusa v1.0)",
        "`python decode.py --model {out} --drafter {out}`; the repository of Medusa's "
        "authors loads it by path",
    ),
    "hydra": Target(
        ("hydra", "hydrapp"),
        "Hydra's own code",
        "`HydraModel.from_pretrained` of the authors' code",
    ),
    "eagle": Target(
        ("eagle",),
        "EAGLE's own code",
        "`EaModel.from_pretrained` of the authors' code, as its `ea_model_path`",
    ),
    "eagle3": Target(
        ("eagle3",),
        "EAGLE-3 in SGLang, vLLM and EAGLE's own code",
        'vLLM: `speculative_config={{"method": "eagle3", "model": "{out}", '
        '"num_speculative_tokens": 4}}`; SGLang: `--speculative-algorithm EAGLE3 '
        "--speculative-draft-model-path {out}`",
        draft_vocab=True,
    ),
    "dflash": Target(
        ("dflash", "dspark"),
        "DFlash and DSpark in vLLM, SGLang and the code of z-lab, SpecForge and DeepSpec",
        'vLLM: `speculative_config={{"method": "{drafter}", "model": "{out}", '
        '"num_speculative_tokens": {heads}}}`; SGLang: `--speculative-algorithm {DRAFTER} '
        "--speculative-draft-model-path {out}`",
    ),
    "speculators": Target(
        ("eagle3", "dflash", "dspark"),
        "EAGLE-3, DFlash and DSpark in vLLM and speculators",
        "`vllm serve {out}`, which serves the base model with these heads",
        draft_vocab=True,
    ),
}


_HYDRA = dict.fromkeys(("hydra", "hydrapp"), ("hydra",))
_BLOCKS = dict.fromkeys(("dflash", "dspark"), ("dflash",))
# Engine -> drafter -> targets that it loads, the most general first.
ENGINES: dict[str, Mapping[str, tuple[str, ...]]] = {
    "medusa_jax": dict.fromkeys(DRAFTERS, ("native",)),
    "vLLM": {"medusa": ("vllm", "tgi"), "eagle": ("vllm",), "eagle3": ("vllm", "eagle3")}
    | dict.fromkeys(_BLOCKS, ("dflash", "speculators")),
    "SGLang": {"eagle": ("sglang",), "eagle3": ("sglang",)} | _BLOCKS,
    "TGI": {"medusa": ("tgi", "tgi_shared")},
    "TensorRT-LLM": {"medusa": ("tensorrt_llm",), "eagle3": ("eagle3",)},
    "llama.cpp": {"eagle3": ("eagle3",)},
    "the authors' code": {"medusa": ("tensorrt_llm", "merged"), "eagle": ("eagle",)}
    | {"eagle3": ("eagle3",)}
    | _HYDRA
    | _BLOCKS,
}


def engines_for(
    heads: HeadsConfig, llama: LlamaConfig | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """The engines that can run such heads, and those that run only others of this family.

    Args:
      llama: the shape of their backbone, on which some layouts depend; None skips these checks.

    Returns: ({engine: the target to convert to}, {engine: the reason}).

    Example: Medusa heads with a draft vocabulary and LM heads of their own ->
    ({"medusa_jax": "native", "vLLM": "vllm"}, {"TGI": "...", "TensorRT-LLM": "...", ...}).
    """
    able, unable = {}, {}
    for name, engine in ENGINES.items():
        targets = engine.get(heads.drafter, ())
        reasons = {target: why_not(heads, target, llama) for target in targets}
        if fit := [target for target, reason in reasons.items() if not reason]:
            able[name] = fit[0]
        elif reasons:
            unable[name] = reasons[targets[0]]
    return able, unable


def why_not(heads: HeadsConfig, target: str, llama: LlamaConfig | None = None) -> str:
    """The reason why heads cannot be written in a target's layout; "" if they can.

    Args: as for `engines_for`.
    """
    from medusa_jax.heads.registry import whole_config

    heads, row = whole_config(heads), TARGETS[target]
    if heads.drafter not in row.drafters:
        fit = [name for name, one in TARGETS.items() if heads.drafter in one.drafters]
        kinds = f"{', '.join(row.drafters)} heads, not {heads.drafter}"
        return f"--to {target} is for {kinds} (these: --to {', '.join(fit)})"
    target = row.instead.get(heads.drafter, target)
    # Heads that share the backbone's LM head can score all tokens.
    if heads.draft_vocab and heads.lm_head != "shared" and not row.draft_vocab:
        able = [name for name in TARGETS if TARGETS[name].draft_vocab]
        able = [name for name in able if heads.drafter in TARGETS[name].drafters]
        return (
            f"--to {target} cannot name the {heads.draft_vocab} tokens of a draft vocabulary, as only "
            f"--to {', '.join(able)} can (heads.lm_head 'shared' or heads.draft_vocab 0 avoids it)"
        )
    if target == "tgi_shared" and (heads.lm_head != "shared" or heads.n_layers != 1):
        return (
            "--to tgi_shared needs one layer and the model's LM head, not "
            f"{heads.n_layers} and LM head {heads.lm_head!r}: --to tgi"
        )
    check = WHY_NOT.get(heads.drafter)
    return check(heads, target, llama) if check and target != "native" else ""


def _why_not_hydra(heads: HeadsConfig, target: str, llama: LlamaConfig | None) -> str:
    fields = ("tie_layers", "skip", "lm_bias")
    tied, skip, bias = (getattr(heads, name) for name in fields)
    if heads.n_layers > 2 and not tied:
        return "Hydra's code runs one layer for layers 2 to n, heads.tie_layers is false"
    if heads.lm_head == "shared" or skip == "fixed" or not bias:
        return (
            "Hydra's code needs separate LM heads with biases and a learned skip connection, not "
            f"lm_head {heads.lm_head!r}, lm_bias {bias}, skip {skip!r}"
        )
    return ""


def _why_not_eagle(heads: HeadsConfig, target: str, llama: LlamaConfig | None) -> str:
    if heads.lm_head != "shared":
        return f"EAGLE-1 heads score by the model's LM head, these have LM head {heads.lm_head!r}"
    if target == "vllm" and getattr(heads, "fc_bias"):  # noqa: B009
        return "vLLM drops the bias after EAGLE's fc without a warning: train with heads.fc_bias=False"
    if target == "eagle" or llama is None:
        return ""
    if llama.qk_norm or llama.mlp_bias or llama.out_bias:
        return (
            f"{target}'s EAGLE-1 has layers without q/k norms and biases of outputs or MLPs"
        )
    if llama.qkv_bias and target == "vllm":
        return (
            "vLLM's EAGLE-1 has the layers of a Llama, these have q/k/v biases: --to sglang"
        )
    return ""


def _why_not_eagle3(heads: HeadsConfig, target: str, llama: LlamaConfig | None) -> str:
    if heads.lm_head != "own":
        return f"EAGLE-3 heads have an LM head of their own, these have LM head {heads.lm_head!r}"
    if target == "speculators":
        return ""
    if heads.n_layers != 1:
        return f"--to {target} holds one layer, not {heads.n_layers}: --to speculators"
    if llama is not None:
        from medusa_jax.heads.registry import make_drafter

        taps = make_drafter(heads, llama).taps
        paper = make_drafter(replace(heads, tap_layers=""), llama).taps  # type: ignore[call-arg]
        if taps != paper:
            return (
                f"--to {target} is for the paper's tapped layers {paper}, not {taps}, since engines do not "
                "agree on how it would say others: --to speculators"
            )
    return ""


def _why_not_dflash(heads: HeadsConfig, target: str, llama: LlamaConfig | None) -> str:
    if target == "speculators":
        return "heads.lm_head low_rank has no place there" * (heads.lm_head == "low_rank")
    if heads.lm_head != "shared" or heads.draft_vocab:
        return (
            "other engines score all tokens by the model's LM head, these heads have LM head "
            f"{heads.lm_head!r} and draft_vocab {heads.draft_vocab}"
        )
    root, rank = (getattr(heads, name) for name in ("root_guesses", "markov_rank"))
    if root != bool(rank):
        return (
            "DSpark's root guesses and it has a Markov head, DFlash's has neither; these have "
            f"root_guesses {root} and markov_rank {rank}"
        )
    return ""


WHY_NOT = {
    "hydra": _why_not_hydra,
    "hydrapp": _why_not_hydra,
    "eagle": _why_not_eagle,
    "eagle3": _why_not_eagle3,
    "dflash": _why_not_dflash,
    "dspark": _why_not_dflash,
}
