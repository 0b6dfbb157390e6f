"""Load the models of a training run."""

import dataclasses
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.config import ModelConfig
from medusa_jax.console import announced
from medusa_jax.errors import UserError, differences
from medusa_jax.files import hf
from medusa_jax.files.fingerprint import Fingerprint
from medusa_jax.files.layouts import native_heads
from medusa_jax.files.layouts.heads_io import load_heads, open_heads
from medusa_jax.heads import vocabulary
from medusa_jax.heads.registry import whole_config
from medusa_jax.model.layers import zero_output
from medusa_jax.model.llama import init_params
from medusa_jax.model.quantise import quantise_backbone
from medusa_jax.sharding import PyTree, init_sharded
from medusa_jax.training.plan import RunPlan
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
        """The fingerprint of the loaded backbone."""
        return None if self.base is None else self.base["fingerprint"]

    @property
    def draft_ids(self) -> jax.Array | None:
        """The tokens that heads score; None: all."""
        ids: jax.Array | None = self.frozen.get(vocabulary.GROUP, {}).get("ids")
        return ids


class LoadedBackbone(NamedTuple):
    """A backbone, and the record by which heads identify it."""

    arch: LlamaConfig
    params: PyTree
    base: Json


def load_setup(plan: RunPlan, with_heads: bool = True) -> Setup:
    """Load the backbone (`model.path`, else a random one of shape `model.arch`) and, unless told otherwise, initial heads.

    Raises:
      UserError: an unreadable file, or heads for another backbone.
    """
    model, train = plan.model, plan.train
    is_trained = "backbone" in plan.groups
    frozen: PyTree = {}
    start: PyTree = {}
    loaded: LoadedBackbone | None = None
    if model.path or not is_trained:
        dtype = jnp.float32 if is_trained else jnp.dtype(model.param_dtype)
        loaded = load_backbone(model, dtype, jax.random.key(train.seed), plan.mesh)
        if is_trained:
            start["backbone"] = loaded.params
        else:
            frozen["backbone"] = loaded.params
        if is_trained and train.backbone_loss == "kl":
            # A copy, since the step donates the buffers of its parameters.
            dtype = jnp.dtype(model.param_dtype)
            frozen["teacher"] = jax.tree.map(lambda x: jnp.array(x, dtype), loaded.params)
    recipe: Json | None = None
    if train.heads_path and with_heads:
        start["heads"], recipe = first_heads(
            train.heads_path, plan.heads, loaded, plan.mesh, model.path
        )
    arch, base = (loaded.arch, loaded.base) if loaded else (plan.arch, None)
    return Setup(arch, frozen, start, base, recipe)


def load_backbone(
    model: ModelConfig, dtype: DTypeLike, key: jax.Array, mesh: Mesh
) -> LoadedBackbone:
    """Load the backbone of `model.path`, with its added layers; without a path, a random one."""
    kind, digest = model.quantise, Fingerprint()

    def convert(arch: LlamaConfig, entry: PyTree) -> PyTree:
        digest.update(arch, entry)
        return quantise_backbone(entry, kind) if kind else entry

    with announced(f"reading the backbone, to {kind}") if kind else nullcontext():
        if not model.path:
            arch = model.arch
            random = init_sharded(mesh, lambda k: init_params(arch, k, dtype), key)
            params = convert(arch, random)
        else:
            arch, params = hf.load_backbone(model.path, mesh, dtype, convert)
            if model.add_layers:
                arch, new = more_layers(arch, model.add_layers, key, mesh)
                params |= convert(arch, new)
    if model.path and not model.add_layers:
        fingerprint = hf.BaseFiles.open(model.path).fingerprint()
    else:
        fingerprint = digest.hexdigest(arch)
    return LoadedBackbone(arch, params, native_heads.base_record(arch, fingerprint))


def first_heads(
    path: str, expected: HeadsConfig, backbone: LoadedBackbone | None, mesh: Mesh, base: str
) -> tuple[PyTree, Json]:
    """Load the heads that training starts from, which must be as `expected`, and their recipe.

    Args:
      base: directory of the backbone; "" for a random one.
    """
    if backbone is None:
        raise UserError(
            f"the heads in {path} belong to a backbone: set model.path to its directory"
        )
    stored = open_heads(path)
    stored = stored.fitted(hf.BaseFiles.open(base)) if base else stored
    heads, params, described = load_heads(
        stored, backbone.arch, mesh, fingerprint=backbone.base["fingerprint"]
    )
    if heads != (wanted := whole_config(expected)):
        differing = differences(heads, wanted)
        raise UserError(f"{path} holds other heads than the configuration: {differing}")
    return params, described.get("recipe", {})


def more_layers(
    arch: LlamaConfig, n: int, key: jax.Array, mesh: Mesh
) -> tuple[LlamaConfig, PyTree]:
    """Create `n` additional last layers that do not change the backbone's function.

    Their output projections are zero, so that they add nothing to the residual stream until trained.

    Returns: (the deeper shape, the new layers in float32, placed on the mesh).
    """
    deeper = dataclasses.replace(arch, n_layers=arch.n_layers + n)

    def init(key: jax.Array) -> PyTree:
        params = init_params(deeper, key)
        names = [f"layers_{i}" for i in range(arch.n_layers, deeper.n_layers)]
        return {name: zero_output(params[name]) for name in names}

    return deeper, init_sharded(mesh, init, key)
