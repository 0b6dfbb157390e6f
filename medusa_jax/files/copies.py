"""Copy files of a model's directory, which may have links to anywhere."""

import glob
import os
import shutil

from medusa_jax.console import inform
from medusa_jax.files.hub import TEMPLATES

GENERATION = "generation_config.json"
# The files of a tokenizer, as transformers names them.
_NAMES = """
    tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.json vocab.json
    vocab.txt merges.txt tokenizer.model spiece.model sentencepiece.bpe.model spm.model tekken.json chat_template.jinja
"""
TOKENIZER_NAMES = [*_NAMES.split(), TEMPLATES]


def copy_tokenizer_files(folder: str, out: str) -> list[str]:
    """Copy the files of a directory's tokenizer; return their names."""
    names = [n for pattern in TOKENIZER_NAMES for n in glob.glob(pattern, root_dir=folder)]
    for name in names:
        copy_inside(folder, name, out)
    return names


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
