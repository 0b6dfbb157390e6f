"""Give a new model directory the tokenizer of another one."""

from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.files.copies import GENERATION, copy_inside, copy_tokenizer_files
from medusa_jax.files.hub import TOKENIZER_FILES, resolve
from medusa_jax.text.tokenizer import declared_eos_ids, load_tokenizer
from medusa_jax.whole_files import Json


def copy_tokenizer(tokenizer_path: str, model_path: str, directory: str) -> Json:
    """Copy a tokenizer's files (by default the model's) and the model's generation_config.json.

    Returns: the fields of config.json with the special ids of both.
    """
    if not (tokenizer_path or model_path):
        return {}
    folder = resolve(tokenizer_path or model_path, TOKENIZER_FILES)
    copy_tokenizer_files(folder, directory)
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
