"""Copy a tokenizer's files from one model directory to another."""

import glob
import os
import shutil

from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.files.hub import TOKENIZER_FILES, resolve
from medusa_jax.text.tokenizer import TEMPLATES, declared_eos_ids, load_tokenizer
from medusa_jax.whole_files import Json

GENERATION = "generation_config.json"
# The files of a tokenizer, as transformers names them.
_NAMES = """
    tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json vocab.txt
    merges.txt tokenizer.model spiece.model sentencepiece.bpe.model spm.model tekken.json chat_template.jinja
"""
NAMES = [*_NAMES.split(), f"{TEMPLATES}/*.jinja"]


def copy_tokenizer(tokenizer_path: str, model_path: str, directory: str) -> Json:
    """Copy a tokenizer's files (by default the model's) and the model's generation_config.json.

    Returns: the fields of config.json with the special ids of both.
    """
    if not (tokenizer_path or model_path):
        return {}
    folder = resolve(tokenizer_path or model_path, TOKENIZER_FILES)
    for pattern in NAMES:
        for name in glob.glob(pattern, root_dir=folder):
            copy_inside(folder, name, directory)
    model_eos_ids: set[int] = set()
    if model_path:
        model_folder = resolve(model_path, TOKENIZER_FILES)
        model_eos_ids = declared_eos_ids(model_folder)
        copy_inside(model_folder, GENERATION, directory)
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


def copy_inside(folder: str, name: str, out: str) -> None:
    """Copy a file of a directory, if it exists; a link that leaves the directory is not followed.

    A downloaded directory may have any links, and the copy may be uploaded. Links of the hub's cache lead to
    the `blobs` next to its snapshots.
    """
    source, base = os.path.realpath(os.path.join(folder, name)), os.path.realpath(folder)
    snapshots = os.path.dirname(base)
    blobs = os.path.join(os.path.dirname(snapshots), "blobs", "")
    is_blob = os.path.basename(snapshots) == "snapshots" and source.startswith(blobs)
    if not os.path.isfile(source):
        return
    if not (source.startswith(os.path.join(base, "")) or is_blob):
        inform(f"{os.path.join(folder, name)} is not copied: it is a link to {source}")
        return
    target = os.path.join(out, name)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copy(source, target)
