"""Configuration and tokenizer of a GGUF file, in Hugging Face form."""

import os

from medusa_jax.errors import UserError
from medusa_jax.files.gguf.architecture import hf_config, hf_tensors
from medusa_jax.files.gguf.reader import GGUFFile, read_gguf
from medusa_jax.files.gguf.vocabulary import (
    UnknownTokenizer,
    build_tokenizer,
    special_ids,
    token_texts,
    tokenizer_settings,
)
from medusa_jax.files.hf_config import family_of, parse_config
from medusa_jax.files.hf_keys import locate
from medusa_jax.files.json_files import REFUSAL
from medusa_jax.files.source import Source
from medusa_jax.files.stored_forms import as_llama
from medusa_jax.model.convert import abstract_params
from medusa_jax.whole_files import Json, write_json, write_text

# Names of sampling options in GGUF metadata -> in generation_config.json.
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def write_files(path: str, directory: str) -> None:
    """Write configuration and tokenizer of a GGUF file, after a check of its tensors' names and shapes."""
    file = read_gguf(path)
    config = hf_config(file) | {"_name_or_path": names_of(file)}
    llama = parse_config(path, config)
    tensors = as_llama(hf_tensors(file, config), family_of(path, config), llama)
    Source(source=path, tensors=tensors, locate=locate).keys(abstract_params(llama))
    ids = special_ids(file)
    if (n_tokens := len(token_texts(file))) > config["vocab_size"]:
        raise UserError(
            f"{path} is damaged: {n_tokens} tokens, but embeddings of {config['vocab_size']}"
        )
    try:
        tokenizer, settings = build_tokenizer(file).to_str(), tokenizer_settings(file)
    except UnknownTokenizer as error:  # the user may name another
        write_text(os.path.join(directory, REFUSAL), str(error))
    else:
        write_text(os.path.join(directory, "tokenizer.json"), tokenizer)
        write_json(os.path.join(directory, "tokenizer_config.json"), settings)
    write_json(os.path.join(directory, "config.json"), config | ids)
    write_json(os.path.join(directory, "generation_config.json"), ids | sampling_of(file))


def names_of(file: GGUFFile) -> str:
    """The model's names in the file's metadata, such as "Qwen2.5 0.5B Instruct Qwen2.5 Instruct"."""
    keys = ("name", "basename", "finetune")
    return " ".join(str(file.values.get(f"general.{key}", "")) for key in keys).strip()


def sampling_of(file: GGUFFile) -> Json:
    """The defaults for texts in the file's metadata, as generation_config.json has them; others by their key."""
    prefix = "general.sampling."
    values = {
        k.removeprefix(prefix): v for k, v in file.values.items() if k.startswith(prefix)
    }
    if values.get("penalty_last_n") == 0:  # the window of llama.cpp's penalty
        values.pop("penalty_repeat", None)
    if values.get("penalty_repeat") in (None, 1):
        values.pop("penalty_last_n", None)
    defaults = {SAMPLING.get(key, prefix + key): value for key, value in values.items()}
    if tokens := file.values.get("tokenizer.ggml.suppress_tokens"):
        defaults["suppress_tokens"] = tokens
    is_sampled = {"temperature", "top_k", "top_p", "min_p"} & defaults.keys()
    return {"do_sample": True} | defaults if is_sampled else defaults
