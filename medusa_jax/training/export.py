"""The models that go into a training run and the result that comes out of it."""

import dataclasses
import glob
import json
import os
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from medusa_jax.config import Config, LlamaConfig
from medusa_jax.console import say
from medusa_jax.errors import UserError
from medusa_jax.model.llama import init_params
from medusa_jax.sharding import init_sharded
from medusa_jax.training.partition import trained_groups

Tree = Any

# Beside the weights, so that a tokenizer's directory may be a model's.
NOT_TOKENIZER = ("config.json", "recipe.json", "model.safetensors.index.json")


class Setup(NamedTuple):
    """Backbone shape, the frozen groups of variables, and trained ones to start from."""

    arch: LlamaConfig
    frozen: Tree
    start: Tree


def load(cfg: Config, mesh: Mesh) -> Setup:
    """The backbone of the run (`model.path`, else `model.arch` at random) and given heads.

    Raises:
      UserError: something that cannot be read, or heads that are not this backbone's.
    """
    frozen_backbone = "backbone" not in trained_groups(cfg)
    dtype = jnp.dtype(cfg.model.param_dtype) if frozen_backbone else jnp.float32
    if cfg.model.path:
        from medusa_jax.interop.hf import load_backbone

        arch, params = load_backbone(cfg.model.path, mesh, dtype)
        if cfg.model.add_layers:
            key = jax.random.key(cfg.train.seed)
            arch, params = deepen(arch, params, cfg.model.add_layers, key)
    else:
        arch, params = cfg.model.arch, None
        if frozen_backbone:
            key = jax.random.key(cfg.train.seed)
            params = init_sharded(mesh, lambda k: init_params(arch, k, dtype), key)
    frozen: Tree = {"backbone": params} if frozen_backbone else {}
    start: Tree = {"backbone": params} if params is not None and not frozen else {}
    if cfg.train.heads_path:
        start["heads"] = load_heads(cfg, arch, params, mesh)
    return Setup(arch, frozen, start)


def deepen(
    arch: LlamaConfig, params: Tree, n: int, key: jax.Array
) -> tuple[LlamaConfig, Tree]:
    """The same function with `n` more layers at its end, as a start for further training.

    A new layer's output projections are zero, so that it adds nothing to the residual stream
    until it has learnt to.
    """
    deeper = dataclasses.replace(arch, n_layers=arch.n_layers + n)
    names = [f"layers_{i}" for i in range(arch.n_layers, deeper.n_layers)]
    fresh = init_params(deeper, key)
    new = {
        name: jax.tree.map(lambda x: x.astype(jnp.float32), fresh[name]) for name in names
    }
    for layer in new.values():
        for part, last in (("self_attn", "o_proj"), ("mlp", "down_proj")):
            layer[part][last] = jax.tree.map(jnp.zeros_like, layer[part][last])
    placed = jax.tree.leaves(params)[0].sharding
    replicate = (
        NamedSharding(placed.mesh, P()) if isinstance(placed, NamedSharding) else placed
    )
    return deeper, params | jax.device_put(new, replicate)


def load_heads(cfg: Config, arch: LlamaConfig, backbone: Tree, mesh: Mesh) -> Tree:
    """The heads of `train.heads_path`, which must be the kind that `heads` describes."""
    from medusa_jax.interop import heads_io, hf

    path = cfg.train.heads_path
    if "heads" not in trained_groups(cfg):
        raise UserError(
            f"train.heads_path is set, but stage {cfg.train.stage} has no heads"
        )
    if backbone is None:
        raise UserError(
            f"the heads in {path} belong to a backbone: set model.path to its directory"
        )
    heads, params, _ = heads_io.load_heads(
        path, arch, mesh, fingerprint=hf.fingerprint(arch, backbone)
    )
    if heads != cfg.heads:
        raise UserError(f"{path} holds {heads}, the configuration says {cfg.heads}")
    return params


def result(
    cfg: Config, setup: Setup, params: Tree, name: str, recipe: dict[str, Any]
) -> None:
    """Write `<workdir>/<name>/`.

    A trained backbone becomes a Hugging Face directory, with its heads in `heads/` inside it.
    Heads of a frozen backbone lie in the directory itself.
    """
    if jax.process_index() != 0:
        return
    directory = os.path.join(cfg.workdir, name)
    heads_directory = directory
    if "backbone" in params:
        from medusa_jax.interop.hf import save_backbone

        ids = copy_tokenizer(cfg.model.tokenizer or cfg.model.path, directory)
        save_backbone(directory, setup.arch, params["backbone"], jnp.float32, ids)
        write_json(os.path.join(directory, "recipe.json"), recipe)
        heads_directory = os.path.join(directory, "heads")
    if "heads" in params:
        from medusa_jax.interop import heads_io

        base = heads_io.describe_base(setup.arch, (setup.frozen | params)["backbone"])
        heads_io.save_heads(
            heads_directory, cfg.heads, params["heads"], base=base, recipe=recipe
        )


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
    try:
        tokenizer = load_tokenizer(folder)
    except UserError as error:  # the weights must not be lost for want of a tokenizer
        say(f"the export has no tokenizer: {error}")
        return {}
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
