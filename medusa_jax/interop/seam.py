"""The seam to `formats/`: the content of a file chooses the module that reads it, which is imported then."""

import importlib
import re
from collections.abc import Collection
from typing import Any

_MEDUSA_PREFIX = r"(?:base_model\.model\.)?(?:model\.)?medusa_head\."
# Head, PEFT's wrapper, layer and leaf of Medusa's keys. PEFT keeps its wrapper's names when a whole model is
# saved instead of its adapter.
MEDUSA = re.compile(
    rf"({_MEDUSA_PREFIX}|)(\d+)\.(modules_to_save\.\w+\.|)(\d+)\.(linear\.(?:weight|bias)|weight)"
)
MEDUSA_HEAD = re.compile(_MEDUSA_PREFIX)
# The same in vLLM's files.
VLLM = re.compile(
    r"(medusa_heads\.|)(?:blocks\.(\d+)\.layers\.(\d+)\.(?:weight|bias)|lm_heads\.(\d+)\.weight)"
)
HYDRA = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(?:linear|res_connection)\.(?:weight|bias)")
_EAGLE = re.compile(r"(?:model\.)?fc\.weight")
# Module of published heads -> patterns of keys, one of each of which such a file has. The first module that fits
# reads the file: speculators' EAGLE-3 files also have EAGLE-1's keys.
LAYOUTS: dict[str, tuple[re.Pattern[str], ...]] = {
    "hydra_files": (HYDRA,),
    "eagle3_files": (
        _EAGLE,
        re.compile(r"(?:model\.)?(?:midlayer|layers\.0)\.hidden_norm\.weight"),
    ),
    "eagle_files": (
        _EAGLE,
        re.compile(r"(?:model\.)?layers\.0\.self_attn\.q_proj\.weight"),
    ),
    "medusa_files": (re.compile(f"{MEDUSA.pattern}|{VLLM.pattern}"),),
}


def find_layout(keys: Collection[str]) -> str:
    """The module of `formats/` that reads heads with these keys; "" if none does."""
    for module, patterns in LAYOUTS.items():
        if all(any(map(pattern.fullmatch, keys)) for pattern in patterns):
            return module
    return ""


def import_format(module: str) -> Any:
    """Import a module of `formats/`, such as "torch_files"."""
    return importlib.import_module(f"medusa_jax.formats.{module}")
