"""The models that go into a training run and the result that comes out of it."""

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

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


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


def result(cfg: Config, setup: Setup, params: Tree, name: str, recipe: dict[str, Any]) -> None:
    """Write `<workdir>/<name>/`: a Hugging Face directory, or a directory of heads."""
    if jax.process_index() != 0:
        return
    directory = os.path.join(cfg.workdir, name)
    if cfg.train.stage == "backbone":
        from medusa_jax.interop.hf import save_backbone

        save_backbone(directory, setup.arch, params, jnp.float32)
        source = cfg.model.tokenizer or cfg.model.path
        for file in TOKENIZER_FILES:
            if os.path.isfile(os.path.join(source, file)):
                shutil.copy(os.path.join(source, file), directory)
        write_json(os.path.join(directory, "recipe.json"), recipe)
        return
    from medusa_jax.interop import heads_io

    base = heads_io.describe_base(setup.arch, setup.frozen)
    heads_io.save_heads(directory, cfg.heads, params, base=base, recipe=recipe)


def write_json(path: str, value: Any) -> None:
    """Indented, and complete or not there."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
    os.replace(path + ".new", path)
