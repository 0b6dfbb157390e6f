"""Copy a tokenizer's files from one model directory to another."""

import glob
import os
import shutil

from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.interop.hub import TOKENIZER_FILES, resolve
from medusa_jax.interop.tokenizer import declared_eos_ids, load_tokenizer
from medusa_jax.whole_files import Json

GENERATION = "generation_config.json"
# Files of a model directory that match `TOKENIZER_FILES` and do not belong to the tokenizer.
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


def copy_tokenizer(tokenizer_path: str, model_path: str, directory: str) -> Json:
    """Copy a tokenizer's files (by default the model's) and the model's generation_config.json.

    Returns: the fields of config.json with the special ids of both.
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
    except UserError as error:  # must not prevent the export of the weights
        inform(f"the export has no tokenizer: {error}")
        return {}
    eos = sorted(tokenizer.eos_ids | model_eos_ids)
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
    }
    return {name: value for name, value in ids.items() if value not in (None, [])}
