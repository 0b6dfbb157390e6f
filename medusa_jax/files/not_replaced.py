"""Files of models and heads, which no result may replace."""

import os
from fnmatch import fnmatch

from medusa_jax.errors import UserError
from medusa_jax.files.json_files import read_json

KEPT_FILES = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json", "config.json", "*_config.json",
    "heads.json", "tokenizer.json", "*.model", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "*.jinja",
)  # fmt: skip
# Fields of a training run's config.json.
RUN_FIELDS = {"model", "heads", "data", "optim", "train", "workdir"}


def refuse_model(path: str, flag: str) -> None:
    """Refuse to write results over a model's files, or into a directory that holds some.

    Raises:
      UserError: names the file.
    """
    files = []
    if os.path.isdir(path):
        files = [os.path.join(path, name) for name in sorted(os.listdir(path))]
    elif os.path.isfile(path):
        files = [path]
    for file in files:
        name = os.path.basename(file).lower()
        if name == "config.json" and file != path and _is_of_a_run(file):
            continue
        if any(fnmatch(name, pattern) for pattern in KEPT_FILES):
            what = "is a file" if file == path else f"holds {name}"
            raise UserError(
                f"{flag} {path} {what} of a model or of another program: give another place"
            )


def _is_of_a_run(config: str) -> bool:
    """Whether a config.json is a training run's; next to checkpoints it may be damaged."""
    try:
        return read_json(config).keys() >= RUN_FIELDS
    except UserError:
        return os.path.isdir(os.path.join(os.path.dirname(config), "checkpoints"))
