"""The models that go into a training run and the result that comes out of it."""

import glob
import json
import os
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from medusa_jax.config import Config, LlamaConfig
from medusa_jax.model.llama import init_params
from medusa_jax.sharding import init_sharded

Tree = Any

# Beside the weights, so that a tokenizer's directory may be a model's.
NOT_TOKENIZER = ("config.json", "recipe.json", "model.safetensors.index.json")


class Setup(NamedTuple):
    """Backbone shape, the frozen parameters, and trained ones to start from (None: fresh)."""

    arch: LlamaConfig
    frozen: Tree
    trainable: Tree


def load(cfg: Config, mesh: Mesh) -> Setup:
    """The backbone of the run: read from `model.path`, or `model.arch` at random."""
    frozen_stage = cfg.train.stage != "backbone"
    dtype = jnp.dtype(cfg.model.param_dtype) if frozen_stage else jnp.float32
    if cfg.model.path:
        from medusa_jax.interop.hf import load_backbone

        arch, params = load_backbone(cfg.model.path, mesh, dtype)
    else:
        arch, params = cfg.model.arch, None
        if frozen_stage:
            key = jax.random.key(cfg.train.seed)
            params = init_sharded(mesh, lambda k: init_params(arch, k, dtype), key)
    return Setup(arch, params, None) if frozen_stage else Setup(arch, {}, params)


def result(
    cfg: Config, setup: Setup, params: Tree, name: str, recipe: dict[str, Any]
) -> None:
    """Write `<workdir>/<name>/`: a Hugging Face directory, or a directory of heads."""
    if jax.process_index() != 0:
        return
    directory = os.path.join(cfg.workdir, name)
    if cfg.train.stage == "backbone":
        from medusa_jax.interop.hf import save_backbone

        source = cfg.model.tokenizer or cfg.model.path
        save_backbone(
            directory, setup.arch, params, jnp.float32, copy_tokenizer(source, directory)
        )
        write_json(os.path.join(directory, "recipe.json"), recipe)
        return
    from medusa_jax.interop import heads_io

    base = heads_io.describe_base(setup.arch, setup.frozen)
    heads_io.save_heads(directory, cfg.heads, params, base=base, recipe=recipe)


def copy_tokenizer(source: str, directory: str) -> dict[str, Any]:
    """Copy a tokenizer's files; returns its special ids as config.json wants them."""
    if not source:
        return {}
    from medusa_jax.interop.hub import TOKENIZER_FILES, resolve
    from medusa_jax.interop.tokenizer import load_tokenizer

    folder = resolve(source, TOKENIZER_FILES)
    os.makedirs(directory, exist_ok=True)
    for pattern in TOKENIZER_FILES:
        for file in glob.glob(os.path.join(folder, pattern)):
            if os.path.basename(file) not in NOT_TOKENIZER:
                shutil.copy(file, directory)
    tokenizer = load_tokenizer(folder)
    eos = sorted(tokenizer.eos_ids)
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
