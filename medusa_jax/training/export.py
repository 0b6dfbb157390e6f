"""The result of a training run: heads, or a backbone with its heads and tokenizer."""

import glob
import json
import os
import shutil
from typing import Any

import jax
import jax.numpy as jnp

from medusa_jax.config import Config, LlamaConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.heads import vocabulary
from medusa_jax.interop import heads_io, hf
from medusa_jax.model import lora
from medusa_jax.model.quantise import dequantise_backbone
from medusa_jax.sharding import PyTree
from medusa_jax.training.setup import Setup

# Beside the weights, so that a tokenizer's directory may be a model's.
GENERATION = "generation_config.json"
NOT_TOKENIZER = ("config.json", GENERATION, "recipe.json", "model.safetensors.index.json")


def result(
    cfg: Config, setup: Setup, params: PyTree, name: str, recipe: dict[str, Any]
) -> None:
    """Write `<workdir>/<name>/`.

    A trained backbone becomes a Hugging Face directory, with its heads in `heads/` inside it;
    adapters are merged into it. Heads of a frozen backbone lie in the directory itself.
    """
    if jax.process_index() != 0:
        return
    directory = os.path.join(cfg.workdir, name)
    heads_directory, base = directory, setup.base
    trained = trained_backbone(cfg, setup, params)
    if trained is not None:
        arch, backbone = trained
        base = heads_io.describe_base(arch, backbone)
        ids = copy_tokenizer(cfg.model.tokenizer, cfg.model.path, directory)
        dtype = jax.tree.leaves(backbone)[0].dtype
        hf.save_backbone(directory, arch, backbone, dtype, ids)
        write_json(os.path.join(directory, "recipe.json"), recipe)
        heads_directory = os.path.join(directory, "heads")
    if "heads" in params:
        assert base is not None
        chosen = {k: setup.frozen[k] for k in (vocabulary.GROUP,) if k in setup.frozen}
        heads_io.save_heads(
            heads_directory, cfg.heads, params["heads"] | chosen, base=base, recipe=recipe
        )


def trained_backbone(
    cfg: Config, setup: Setup, params: PyTree
) -> tuple[LlamaConfig, PyTree] | None:
    """The backbone that a run changed, as it is exported; None if it is the one it began with.

    Adapters are merged in float32 into what they were trained on (a quantised kernel counts
    with its quantised value) and stored like the frozen backbone.
    """
    if "backbone" in params:
        return setup.arch, params["backbone"]
    if "lora" not in params:
        return None
    original = dequantise_backbone(setup.frozen["backbone"])
    arch, merged = lora.merge(setup.arch, original, params["lora"], cfg.lora)
    dtype = jnp.dtype(cfg.model.param_dtype)
    return arch, jax.tree.map(lambda x: x.astype(dtype), merged)


def copy_tokenizer(tokenizer_path: str, model_path: str, directory: str) -> dict[str, Any]:
    """Copy a tokenizer's files (by default those beside the model), and the model's own
    generation_config.json; returns the special ids of both as config.json wants them.
    """
    if not (tokenizer_path or model_path):
        return {}
    from medusa_jax.interop.hub import TOKENIZER_FILES, resolve
    from medusa_jax.interop.tokenizer import declared_eos_ids, load_tokenizer

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


def write_json(path: str, value: Any) -> None:
    """Indented, and complete or not there."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
    os.replace(path + ".new", path)
