"""Load the models of a training run, and export its result: heads, or a backbone with heads and tokenizer."""

import dataclasses
import importlib
import os
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.config import LoraConfig, ModelConfig, TrainConfig
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError
from medusa_jax.files import hf
from medusa_jax.files.fingerprint import Fingerprint, fingerprint
from medusa_jax.files.layouts import own_heads
from medusa_jax.files.layouts.stored_heads import check_ids
from medusa_jax.heads import vocabulary
from medusa_jax.heads.registry import whole_config
from medusa_jax.heads.vocabulary import COUNTS, covered, most_frequent
from medusa_jax.hosts import first
from medusa_jax.model.layers import zero_output
from medusa_jax.model.llama import init_params
from medusa_jax.model.lora import merge
from medusa_jax.model.quantise import dequantise_backbone, quantise_backbone
from medusa_jax.sharding import PyTree, init_sharded, replicated
from medusa_jax.training.data.rows import Rows
from medusa_jax.whole_files import Json, read_array, write_array, write_json


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
        if model.path and not model.add_layers:
            fingerprint = hf.BaseFiles.open(model.path).fingerprint()
        else:
            fingerprint = seen.hexdigest(arch)
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
        names = [f"layers_{i}" for i in range(arch.n_layers, deeper.n_layers)]
        return {name: zero_output(fresh[name]) for name in names}

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
    heads_io = importlib.import_module("medusa_jax.files.layouts.heads_io")
    heads, params, described = heads_io.load_heads(
        path, arch, mesh, fingerprint=base["fingerprint"]
    )
    if heads != whole_config(expected):
        raise UserError(f"{path} holds {heads}, but the configuration is {expected}")
    return params, described.get("recipe", {})


def export(
    directory: str, model: ModelConfig, heads: HeadsConfig, lora: LoraConfig, setup: Setup,
    params: PyTree, recipe: Json,
) -> None:  # fmt: skip
    """Write the result of a run to `directory`.

    A trained backbone becomes a Hugging Face directory, with its heads in `heads/` inside it;
    adapters are merged into it. Heads of a frozen backbone are in the directory itself. Every
    process must call this; process 0 writes.
    """
    write, ids = first(), {}
    heads_directory, base = directory, setup.base
    trained = trained_backbone(jnp.dtype(model.param_dtype), lora, setup, params)
    if trained is not None:
        arch, backbone = trained
        base = own_heads.base_record(arch, fingerprint(arch, backbone))
        dtype = jax.tree.leaves(backbone)[0].dtype
        # A seam: `train.stage` says whether the backbone is trained.
        files = importlib.import_module("medusa_jax.text.tokenizer_files")
        writer = importlib.import_module("medusa_jax.files.hf_writer")
        if write:
            ids = files.copy_tokenizer(model.tokenizer, model.path, directory)
        writer.save_backbone(directory, arch, backbone, dtype, ids, write)
        if write:
            write_json(os.path.join(directory, "recipe.json"), recipe)
        heads_directory = os.path.join(directory, "heads")
    if "heads" in params:
        assert base is not None
        chosen = {k: setup.frozen[k] for k in (vocabulary.GROUP,) if k in setup.frozen}
        own = params["heads"] | chosen
        own_heads.save_heads(
            heads_directory, heads, own, base=base, recipe=recipe, write=write
        )


def trained_backbone(
    dtype: DTypeLike, lora: LoraConfig, setup: Setup, params: PyTree
) -> tuple[LlamaConfig, PyTree] | None:
    """The trained backbone for export; None if the run did not change it.

    Adapters are merged in float32 into the (dequantised) backbone that they were trained on, then stored in
    the type of the frozen backbone.
    """
    if "backbone" in params:
        return setup.arch, params["backbone"]
    if "lora" not in params:
        return None
    original = dequantise_backbone(setup.frozen["backbone"])
    arch, merged = merge(setup.arch, original, params["lora"], lora)
    return arch, jax.tree.map(lambda x: x.astype(dtype), merged)


DRAFT_VOCAB = "draft_vocab.npy"


def draft_vocab(
    heads: HeadsConfig, vocab_size: int, rows: Rows, workdir: str, source: str = ""
) -> np.ndarray:
    """Ids of the `heads.draft_vocab` most frequent tokens, ascending.

    Chosen at the first start; a resumed run reads them from its workdir.

    Args:
      source: token counts (`data.draft_vocab_from`); "": those of `rows`.

    Raises:
      UserError: counts that are unreadable or have the wrong size.
    """
    n, path = heads.draft_vocab, os.path.join(workdir, DRAFT_VOCAB)
    if os.path.exists(path):
        ids = read_array(path)
        check_ids(ids, heads, vocab_size, path)
        return ids
    text_counts_V = rows.counts(vocab_size)
    counts_V = read_counts(source, vocab_size) if source else text_counts_V
    ids = most_frequent(counts_V, n)
    if jax.process_index() == 0:
        write_array(path, ids)
    inside = text_counts_V[ids].sum() / max(text_counts_V.sum(), 1)
    inform(
        f"heads score {n} of {vocab_size} tokens: {100 * inside:.2f}% of the counted text, "
        f"{100 * covered(counts_V, n):.2f}% of the text that chose them"
    )
    return ids


def read_counts(source: str, vocab_size: int) -> np.ndarray:
    """Token counts [V] written by `distill`.

    Args:
      source: the file or its directory.
    """
    path = os.path.join(source, COUNTS) if os.path.isdir(source) else source
    counts_V = read_array(path)
    if counts_V.shape != (vocab_size,) or counts_V.dtype.kind not in "iu":
        raise UserError(
            f"{path} holds {counts_V.dtype}{list(counts_V.shape)}, not the counts of a vocabulary "
            f"of {vocab_size}"
        )
    return counts_V
