"""Load the models of a training run."""

import dataclasses
import importlib
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.config import ModelConfig, TrainConfig
from medusa_jax.console import announced
from medusa_jax.errors import UserError
from medusa_jax.heads import vocabulary
from medusa_jax.heads.registry import whole_config
from medusa_jax.interop import hf, own_heads
from medusa_jax.interop.base_files import fingerprint_as_read
from medusa_jax.interop.fingerprint import Fingerprint
from medusa_jax.model.llama import init_params
from medusa_jax.model.quantise import quantise_backbone
from medusa_jax.sharding import PyTree, init_sharded, replicated
from medusa_jax.whole_files import Json


class Setup(NamedTuple):
    """The models that a run starts from.

    Attributes:
      arch: the backbone's shape.
      frozen: groups of variables that are not trained: "backbone" under heads or adapters (perhaps
        quantised), "teacher", the original of a trained backbone, "draft_vocab" with the ids that heads
        score.
      start: trained groups with given initial values.
      base: the record by which heads identify the loaded backbone; None without a backbone.
      heads_recipe: the recipe of the initial heads; None for fresh ones.
    """

    arch: LlamaConfig
    frozen: PyTree
    start: PyTree
    base: Json | None
    heads_recipe: Json | None = None

    @property
    def fingerprint(self) -> str | None:
        """Of the loaded backbone."""
        return None if self.base is None else self.base["fingerprint"]


def load_setup(
    model: ModelConfig, heads: HeadsConfig, train: TrainConfig, trained: Collection[str], mesh: Mesh
) -> Setup:  # fmt: skip
    """Load the backbone (`model.path`, else a random one of shape `model.arch`) and initial heads.

    Args:
      trained: the trained groups.

    Raises:
      UserError: an unreadable file, or heads for another backbone.
    """
    frozen_backbone = "backbone" not in trained
    dtype = jnp.dtype(model.param_dtype) if frozen_backbone else jnp.float32
    kind, seen = model.quantise, Fingerprint()
    arch, params = model.arch, None

    def convert(arch: LlamaConfig, entry: PyTree) -> PyTree:
        seen.update(arch, entry)
        return quantise_backbone(entry, kind) if kind else entry

    key = jax.random.key(train.seed)
    with announced(f"reading the backbone, to {kind}") if kind else nullcontext():
        if model.path:
            arch, params = hf.load_backbone(model.path, mesh, dtype, convert)
            if model.add_layers:
                arch, new = more_layers(arch, model.add_layers, key, mesh)
                params |= convert(arch, new)
        elif frozen_backbone:
            params = convert(
                arch, init_sharded(mesh, lambda k: init_params(arch, k, dtype), key)
            )
    base = None
    if params is not None:
        fingerprint = fingerprint_as_read(model.path, seen, arch, dtype)
        base = own_heads.base_record(arch, fingerprint)
    start: PyTree = {}
    recipe: Json | None = None
    if train.heads_path:
        start["heads"], recipe = load_heads(train.heads_path, heads, arch, base, mesh)
    if params is not None and frozen_backbone:
        return Setup(arch, {"backbone": params}, start, base, recipe)
    frozen: PyTree = {}
    if params is not None:
        start["backbone"] = params
        if train.backbone_loss == "kl":
            # A copy, since the step donates the buffers of its parameters.
            dtype = jnp.dtype(model.param_dtype)
            frozen["teacher"] = jax.tree.map(lambda x: jnp.array(x, dtype), params)
    return Setup(arch, frozen, start, base, recipe)


def with_draft_vocab(setup: Setup, mesh: Mesh, choose: Callable[[], np.ndarray]) -> Setup:
    """Add the draft vocabulary of the initial heads; without one, call `choose`."""
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
    """Create `n` additional last layers that do not change the backbone's function.

    Their output projections are zero, so that they add nothing to the residual stream until trained.

    Returns: (the deeper shape, the new layers in float32, placed on the mesh).
    """
    deeper = dataclasses.replace(arch, n_layers=arch.n_layers + n)

    def init(key: jax.Array) -> PyTree:
        fresh = init_params(deeper, key)
        new = {
            f"layers_{i}": fresh[f"layers_{i}"]
            for i in range(arch.n_layers, deeper.n_layers)
        }
        for layer in new.values():
            for module, output in (("self_attn", "o_proj"), ("mlp", "down_proj")):
                layer[module][output] = jax.tree.map(jnp.zeros_like, layer[module][output])
        return new

    return deeper, init_sharded(mesh, init, key)


def load_heads(
    path: str, expected: HeadsConfig, arch: LlamaConfig, base: Json | None, mesh: Mesh
) -> tuple[PyTree, Json]:
    """Load heads, which must be as `expected`, and their recipe."""
    if base is None:
        raise UserError(
            f"the heads in {path} belong to a backbone: set model.path to its directory"
        )
    # Seam: chosen by `train.heads_path`.
    heads_io = importlib.import_module("medusa_jax.interop.heads_io")
    heads, params, described = heads_io.load_heads(
        path, arch, mesh, fingerprint=base["fingerprint"]
    )
    if heads != whole_config(expected):
        raise UserError(f"{path} holds {heads}, but the configuration is {expected}")
    return params, described.get("recipe", {})
