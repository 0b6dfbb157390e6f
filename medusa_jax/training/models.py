"""Load the models of a training run."""

from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.console import announced
from medusa_jax.errors import UserError, differences
from medusa_jax.files.fingerprint import fingerprint
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.layouts import native_heads
from medusa_jax.files.layouts.heads_io import load_heads, open_heads
from medusa_jax.files.source import flatten
from medusa_jax.heads import vocabulary
from medusa_jax.heads.registry import whole_config
from medusa_jax.model.layers import zero_output
from medusa_jax.model.llama import init_params
from medusa_jax.model.quantise import quantise_backbone
from medusa_jax.sharding import PyTree, init_sharded, replicated
from medusa_jax.training.plan import RunPlan
from medusa_jax.whole_files import Json


class Setup(NamedTuple):
    """The models that a run starts from.

    Attributes:
      frozen: groups of variables that are not trained: "backbone" under heads or adapters (perhaps
        quantised), "teacher", the original of a trained backbone, "draft_vocab" with the ids that heads
        score.
      start: trained groups with given initial values.
      base: the record by which heads identify the loaded backbone; None without a backbone.
      heads_recipe: the recipe of the initial heads; None for fresh ones.
    """

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

    def scoring(self, ids_O: np.ndarray, mesh: Mesh) -> "Setup":
        """The setup with heads that score these tokens."""
        group = {"ids": jax.device_put(ids_O, replicated(mesh))}
        return self._replace(frozen=self.frozen | {vocabulary.GROUP: group})


def load_setup(plan: RunPlan, with_heads: bool = True) -> Setup:
    """Load the backbone (`model.path`, else a random one of shape `model.arch`) and, unless told otherwise, initial heads.

    Raises:
      UserError: an unreadable file, or heads for another backbone.
    """
    is_trained, stored = "backbone" in plan.groups, jnp.dtype(plan.model.param_dtype)
    files = BaseFiles.open(plan.model.path) if plan.model.path else None
    frozen: PyTree = {}
    start: PyTree = {}
    base: Json | None = None
    if files or not is_trained:
        dtype = jnp.float32 if is_trained else stored
        params, mark = first_backbone(plan, files, dtype)
        base = native_heads.base_record(plan.arch, mark)
        if is_trained:
            start["backbone"] = params
        else:
            frozen["backbone"] = params
        if is_trained and plan.train.backbone_loss == "kl":
            # A copy, since the step donates the buffers of its parameters.
            frozen["teacher"] = jax.tree.map(lambda x: jnp.array(x, stored), params)
    recipe: Json | None = None
    if plan.train.heads_path and with_heads:
        start["heads"], recipe = first_heads(plan, files, base)
        if vocabulary.GROUP in start["heads"]:
            frozen[vocabulary.GROUP] = start["heads"].pop(vocabulary.GROUP)
    return Setup(frozen, start, base, recipe)


def first_backbone(
    plan: RunPlan, files: BaseFiles | None, dtype: DTypeLike
) -> tuple[PyTree, str]:
    """Load the backbone that training starts from, or make a random one; returns its parameters and fingerprint."""
    arch, mesh, kind = plan.arch, plan.mesh, plan.model.quantise
    key = jax.random.key(plan.train.seed)

    def convert(entry: PyTree) -> PyTree:
        return quantise_backbone(entry, kind) if kind else entry

    with announced(f"reading the backbone, to {kind}") if kind else nullcontext():
        if not files:
            random = init_sharded(mesh, lambda k: init_params(arch, k, dtype), key)
            return convert(random), fingerprint(arch, random)
        params, stored = files.parameters(mesh, dtype, convert), files.by_row()
        if n := plan.model.add_layers:
            added = more_layers(arch, n, key, mesh)
            params, stored = params | convert(added), stored | flatten(added)
    return params, fingerprint(arch, stored)


def first_heads(
    plan: RunPlan, files: BaseFiles | None, base: Json | None
) -> tuple[PyTree, Json]:
    """Load the heads that training starts from, and their recipe. Their configuration must be the plan's.

    Args:
      files: of the backbone; None for a random one.
      base: the backbone's record; None without a backbone.
    """
    path = plan.train.heads_path
    if base is None:
        raise UserError(
            f"the heads in {path} belong to a backbone: set model.path to its directory"
        )
    stored = open_heads(path)
    stored = stored.fitted(files) if files else stored
    heads, params, described = load_heads(
        stored, plan.arch, plan.mesh, fingerprint=base["fingerprint"]
    )
    if heads != (wanted := whole_config(plan.heads)):
        differing = differences(heads, wanted)
        raise UserError(f"{path} holds other heads than the configuration: {differing}")
    return params, described.get("recipe", {})


def more_layers(arch: LlamaConfig, n: int, key: jax.Array, mesh: Mesh) -> PyTree:
    """Create the `n` last layers of this shape, which do not change the function of those before.

    Their output projections are zero, so that they add nothing to the residual stream until trained.

    Returns: the new layers in float32, placed on the mesh.
    """

    def init(key: jax.Array) -> PyTree:
        params = init_params(arch, key)
        names = [f"layers_{i}" for i in range(arch.n_layers - n, arch.n_layers)]
        return {name: zero_output(params[name]) for name in names}

    return init_sharded(mesh, init, key)
