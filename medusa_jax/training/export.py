"""The models that go into a training run and the result that comes out of it."""

import dataclasses
import glob
import json
import os
import shutil
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from medusa_jax.config import Config, LlamaConfig
from medusa_jax.console import announced, say
from medusa_jax.errors import UserError
from medusa_jax.heads import whole_config
from medusa_jax.interop import heads_io, hf
from medusa_jax.model import lora
from medusa_jax.model.llama import init_params
from medusa_jax.model.quantise import dequantise_backbone, quantise_backbone
from medusa_jax.sharding import init_sharded
from medusa_jax.training.partition import trained_groups

Tree = Any

# Beside the weights, so that a tokenizer's directory may be a model's.
GENERATION = "generation_config.json"
NOT_TOKENIZER = ("config.json", GENERATION, "recipe.json", "model.safetensors.index.json")


class Setup(NamedTuple):
    """Where a run starts.

    Attributes:
      arch: the backbone's shape.
      frozen: groups of variables that stay: "backbone" under heads or adapters (quantised, if
        asked for), "teacher" where a trained backbone keeps a copy of itself.
      start: trained groups that are not initialised afresh.
      base: how heads on the backbone as loaded name it; None if there is none yet.
    """

    arch: LlamaConfig
    frozen: Tree
    start: Tree
    base: dict[str, Any] | None


def load(cfg: Config, mesh: Mesh) -> Setup:
    """The backbone of the run (`model.path`, else `model.arch` at random) and given heads.

    Raises:
      UserError: something that cannot be read, or heads that are not this backbone's.
    """
    frozen_backbone = "backbone" not in trained_groups(cfg)
    dtype = jnp.dtype(cfg.model.param_dtype) if frozen_backbone else jnp.float32
    kind, marks = cfg.model.quantise, hf.Fingerprint()
    arch, params = cfg.model.arch, None

    def keep(arch: LlamaConfig, part: Tree) -> Tree:
        marks.see(arch, part)
        return quantise_backbone(part, kind) if kind else part

    key = jax.random.key(cfg.train.seed)
    with announced(f"reading the backbone, to {kind}") if kind else nullcontext():
        if cfg.model.path:
            arch, params = hf.load_backbone(cfg.model.path, mesh, dtype, keep)
            if cfg.model.add_layers:
                arch, new = more_layers(arch, cfg.model.add_layers, key, mesh)
                params |= keep(arch, new)
        elif frozen_backbone:
            params = keep(
                arch, init_sharded(mesh, lambda k: init_params(arch, k, dtype), key)
            )
    base = None if params is None else heads_io.base_record(arch, marks.digits(arch))
    start: Tree = {}
    if cfg.train.heads_path:
        start["heads"] = load_heads(cfg, arch, base, mesh)
    if params is not None and frozen_backbone:
        return Setup(arch, {"backbone": params}, start, base)
    frozen: Tree = {}
    if params is not None:
        start["backbone"] = params
        if cfg.train.backbone_loss == "kl":
            # A copy: the step gives its own parameters' buffers away.
            dtype = jnp.dtype(cfg.model.param_dtype)
            frozen["teacher"] = jax.tree.map(lambda x: jnp.array(x, dtype), params)
    return Setup(arch, frozen, start, base)


def more_layers(
    arch: LlamaConfig, n: int, key: jax.Array, mesh: Mesh
) -> tuple[LlamaConfig, Tree]:
    """`n` layers for the end of a backbone that leave its function as it is: a start for training.

    A new layer's output projections are zero, so that it adds nothing to the residual stream
    until it has learnt to.

    Returns: (the deeper shape, the new layers in float32, where the table wants them).
    """
    deeper = dataclasses.replace(arch, n_layers=arch.n_layers + n)

    def init(key: jax.Array) -> Tree:
        fresh = init_params(deeper, key)
        new = {
            f"layers_{i}": fresh[f"layers_{i}"]
            for i in range(arch.n_layers, deeper.n_layers)
        }
        for layer in new.values():
            for part, last in (("self_attn", "o_proj"), ("mlp", "down_proj")):
                layer[part][last] = jax.tree.map(jnp.zeros_like, layer[part][last])
        return new

    return deeper, init_sharded(mesh, init, key)


def load_heads(
    cfg: Config, arch: LlamaConfig, base: dict[str, Any] | None, mesh: Mesh
) -> Tree:
    """The heads of `train.heads_path`, which must be the kind that `heads` describes."""
    path = cfg.train.heads_path
    if "heads" not in trained_groups(cfg):
        raise UserError(
            f"train.heads_path is set, but stage {cfg.train.stage} has no heads"
        )
    if base is None:
        raise UserError(
            f"the heads in {path} belong to a backbone: set model.path to its directory"
        )
    heads, params, _ = heads_io.load_heads(
        path, arch, mesh, fingerprint=base["fingerprint"]
    )
    if heads != whole_config(cfg.heads):
        raise UserError(f"{path} holds {heads}, the configuration says {cfg.heads}")
    return params


def result(
    cfg: Config, setup: Setup, params: Tree, name: str, recipe: dict[str, Any]
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
        heads_io.save_heads(
            heads_directory, cfg.heads, params["heads"], base=base, recipe=recipe
        )


def trained_backbone(
    cfg: Config, setup: Setup, params: Tree
) -> tuple[LlamaConfig, Tree] | None:
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
        say(f"the export has no tokenizer: {error}")
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
