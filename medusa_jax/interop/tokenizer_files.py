"""A tokenizer's files, copied from one model directory to another."""

import glob
import os
import shutil
from typing import Any

from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.interop.hub import TOKENIZER_FILES, resolve
from medusa_jax.interop.tokenizer import declared_eos_ids, load_tokenizer

# Beside the weights, so that a tokenizer's directory may be a model's.
GENERATION = "generation_config.json"
NOT_TOKENIZER = (
    "config.json",
    "adapter_config.json",
    GENERATION,
    "recipe.json",
    "tree.json",
    "heads.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)


def copy_tokenizer(tokenizer_path: str, model_path: str, directory: str) -> dict[str, Any]:
    """Copy a tokenizer's files (by default those beside the model), and the model's own
    generation_config.json; returns the special ids of both as config.json wants them.
    """
    if not (tokenizer_path or model_path):
        return {}
    folder = resolve(tokenizer_path or model_path, TOKENIZER_FILES)
    os.makedirs(directory, exist_ok=True)
    for pattern in TOKENIZER_FILES:
        for file in glob.glob(os.path.join(folder, pattern)):
            if os.path.basename(file) not in NOT_TOKENIZER:
                shutil.copy(file, directory)
    model_eos_ids: set[int] = set()
    if model_path:
        model_folder = resolve(model_path, TOKENIZER_FILES)
        model_eos_ids = declared_eos_ids(model_folder)
        generation = os.path.join(model_folder, GENERATION)
        if os.path.isfile(generation):
            shutil.copy(generation, directory)
    try:
        tokenizer = load_tokenizer(folder)
    except UserError as error:  # the weights must not be lost for want of a tokenizer
        inform(f"the export has no tokenizer: {error}")
        return {}
    eos = sorted(tokenizer.eos_ids | model_eos_ids)
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
    }
    return {name: value for name, value in ids.items() if value not in (None, [])}
