"""The models that go into a training run."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from medusa_jax.config import Config, LlamaConfig
from medusa_jax.console import announced
from medusa_jax.errors import UserError
from medusa_jax.heads import vocabulary, whole_config
from medusa_jax.interop import heads_io, hf
from medusa_jax.interop.base_files import fingerprint_as_read
from medusa_jax.model.llama import init_params
from medusa_jax.model.quantise import quantise_backbone
from medusa_jax.sharding import PyTree, init_sharded, replicated
from medusa_jax.training.partition import trained_groups


class Setup(NamedTuple):
    """Where a run starts.

    Attributes:
      arch: the backbone's shape.
      frozen: groups of variables that stay: "backbone" under heads or adapters (quantised, if
        asked for), "teacher" where a trained backbone keeps a copy of itself, "draft_vocab" with
        the ids that heads score.
      start: trained groups that are not initialised afresh.
      base: how heads on the backbone as loaded name it; None if there is none yet.
      heads_recipe: how the heads to start from came about; None for fresh ones.
    """

    arch: LlamaConfig
    frozen: PyTree
    start: PyTree
    base: dict[str, Any] | None
    heads_recipe: dict[str, Any] | None = None


def load_setup(cfg: Config, mesh: Mesh) -> Setup:
    """The backbone of the run (`model.path`, else `model.arch` at random) and given heads.

    Raises:
      UserError: something that cannot be read, or heads that are not this backbone's.
    """
    frozen_backbone = "backbone" not in trained_groups(cfg)
    dtype = jnp.dtype(cfg.model.param_dtype) if frozen_backbone else jnp.float32
    kind, marks = cfg.model.quantise, hf.Fingerprint()
    arch, params = cfg.model.arch, None

    def keep(arch: LlamaConfig, part: PyTree) -> PyTree:
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
    base = None
    if params is not None:
        own = fingerprint_as_read(cfg.model.path, marks, arch, dtype)
        base = heads_io.base_record(arch, own)
    start: PyTree = {}
    recipe: dict[str, Any] | None = None
    if cfg.train.heads_path:
        start["heads"], recipe = load_heads(cfg, arch, base, mesh)
    if params is not None and frozen_backbone:
        return Setup(arch, {"backbone": params}, start, base, recipe)
    frozen: PyTree = {}
    if params is not None:
        start["backbone"] = params
        if cfg.train.backbone_loss == "kl":
            # A copy: the step gives its own parameters' buffers away.
            dtype = jnp.dtype(cfg.model.param_dtype)
            frozen["teacher"] = jax.tree.map(lambda x: jnp.array(x, dtype), params)
    return Setup(arch, frozen, start, base, recipe)


def with_draft_vocab(setup: Setup, mesh: Mesh, choose: Callable[[], np.ndarray]) -> Setup:
    """The setup with a draft vocabulary: that of the heads it starts from, else a chosen one."""
    start, heads = dict(setup.start), dict(setup.start.get("heads", {}))
    if vocabulary.GROUP in heads:
        group = heads.pop(vocabulary.GROUP)
        start["heads"] = heads
    else:
        group = {"ids": jax.device_put(choose(), replicated(mesh))}
    frozen = setup.frozen | {vocabulary.GROUP: group}
    return setup._replace(frozen=frozen, start=start)


def more_layers(
    arch: LlamaConfig, n: int, key: jax.Array, mesh: Mesh
) -> tuple[LlamaConfig, PyTree]:
    """`n` layers for the end of a backbone that leave its function as it is: a start for training.

    A new layer's output projections are zero, so that it adds nothing to the residual stream
    until it has learnt to.

    Returns: (the deeper shape, the new layers in float32, where the table wants them).
    """
    deeper = dataclasses.replace(arch, n_layers=arch.n_layers + n)

    def init(key: jax.Array) -> PyTree:
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
) -> tuple[PyTree, dict[str, Any]]:
    """The heads of `train.heads_path`, which must be the kind that `heads` describes, and their recipe."""
    path = cfg.train.heads_path
    if "heads" not in trained_groups(cfg):
        raise UserError(
            f"train.heads_path is set, but stage {cfg.train.stage} has no heads"
        )
    if base is None:
        raise UserError(
            f"the heads in {path} belong to a backbone: set model.path to its directory"
        )
    heads, params, described = heads_io.load_heads(
        path, arch, mesh, fingerprint=base["fingerprint"]
    )
    if heads != whole_config(cfg.heads):
        raise UserError(f"{path} holds {heads}, the configuration says {cfg.heads}")
    return params, described.get("recipe", {})
