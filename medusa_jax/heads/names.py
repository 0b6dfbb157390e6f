"""The names of all drafters. Imports nothing heavy, so that `--help` can show them at once."""

import re

# Name and class of every drafter of the package. `DRAFTERS` have heads, which are trained and stored;
# `BASELINES` have none.
DRAFTERS = {
    "amphista": "medusa_jax.heads.amphista:Amphista",
    "amphista_alpha": "medusa_jax.heads.amphista:AmphistaAlpha",
    "dflash": "medusa_jax.heads.dflash:DFlash",
    "dspark": "medusa_jax.heads.dflash:DSpark",
    "eagle": "medusa_jax.heads.eagle:Eagle",
    "eagle3": "medusa_jax.heads.eagle3:Eagle3",
    "hydra": "medusa_jax.heads.hydra:Hydra",
    "hydrapp": "medusa_jax.heads.hydrapp:HydraPP",
    "medusa": "medusa_jax.heads.medusa:Medusa",
}
BASELINES = {
    "draft_model": "medusa_jax.heads.draft_model:DraftModel",
    "prompt_lookup": "medusa_jax.heads.prompt_lookup:PromptLookup",
}
# Entry points with which other packages add drafters: name = "module:Class".
ENTRY_POINTS = "medusa_jax.drafters"

_MODULE_CLASS = re.compile(r"([A-Za-z_][\w.]*:[A-Za-z_]\w*)(?::(.*))?")


def split_drafter(drafter: str) -> tuple[str, str]:
    """Split the value of `--drafter` into a drafter's name and the rest, its fields or a path.

    Example:  prompt_lookup:tokens=4                  prompt_lookup, tokens=4
              examples.tiny_drafter:Tiny:work/heads   examples.tiny_drafter:Tiny, work/heads
    """
    name, _, options = drafter.partition(":")
    match = _MODULE_CLASS.fullmatch(drafter)
    if name in DRAFTERS or name in BASELINES or match is None:
        return name, options
    return match[1], match[2] or ""


def drafter_at(name: str, path: str) -> str:
    """The value of `--drafter` for heads at a path; `split_drafter` splits it again."""
    return f"{name}:{path}" if is_module_class(name) else path


def is_module_class(name: str) -> bool:
    """Whether a drafter's name is `module:Class`, a class of any importable module."""
    return bool(_MODULE_CLASS.fullmatch(name))
