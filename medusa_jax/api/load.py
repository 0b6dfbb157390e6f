"""From files to a `Model`: the backbone, its tokenizer, its heads and their tree."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike, fspath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from medusa_jax.api.asking import typed
from medusa_jax.api.finding import (
    bundled_draft_model,
    default_drafter,
    find_heads,
    find_model,
)
from medusa_jax.api.model import Model
from medusa_jax.api.tree_choice import TreeChoice
from medusa_jax.arch import DTYPES, STORED, HeadsConfig, LlamaConfig
from medusa_jax.console import inform
from medusa_jax.devices.platforms import before_ampere
from medusa_jax.errors import UserError, between, one_of
from medusa_jax.files import hf
from medusa_jax.files.fingerprint import Fingerprint
from medusa_jax.files.hf import BaseFiles, fingerprint_as_read
from medusa_jax.files.layouts import heads_io
from medusa_jax.files.layouts.stored_heads import StoredHeads
from medusa_jax.files.tensors import stands_for_gguf
from medusa_jax.heads import vocabulary
from medusa_jax.heads.names import BASELINES
from medusa_jax.heads.registry import make_drafter
from medusa_jax.kernels.choose import choose_kernels
from medusa_jax.model.blocks import BlockRows
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.placing import choose_storage, place_head, place_part, store
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import Params, make_mesh, param_shardings
from medusa_jax.text.tokenizer import (
    NoTokenizer,
    declared_eos_ids,
    has_tokenizer,
    load_tokenizer,
)
from medusa_jax.tree.tree import Tree
from medusa_jax.typed import read

# Each n-gram token adds one comparison per position to a step.
LONGEST_NGRAM = 64


def default_dtype() -> str:
    """float32 on a CPU (its bfloat16 products are slow), bfloat16 elsewhere."""
    if before_ampere():
        inform(
            "note: this GPU unpacks bfloat16 weights in every step: dtype float16 is faster"
        )
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


@typed
def load(
    model: str | PathLike[str] | None = None,
    drafter: str | PathLike[str] | None = None,
    *,
    tree: str | Tree = "auto",
    dtype: str | None = None,
    weights: str | None = None,
    draft_weights: str | None = None,
    activations: int = 16,
    mesh: Sequence[int] = (1, 1, 1),
    tokenizer: str | PathLike[str] | None = None,
    batch: int = 1,
    all_heads: bool = True,
    no_repeat_ngram_size: int | None = None,
    eos_ids: Sequence[int] | None = None,
    allow_other_base: bool = False,
    kernels: Kernels | None = None,
) -> Model:
    """Load a backbone and its draft heads. Without arguments: the bundled demo.

    Args:
      model: directory, GGUF file, name (`files/names.py`) or hub id of a Llama-family model;
        None is the demo.
      drafter: a name from the registry (the heads of that kind that come with the demo or with
        a model called by name); a directory, a file or a hub id with heads, ours or published
        ones (docs/formats.md); a drafter without heads (`api/baselines.py`); or "none". By
        default the result of `default_drafter`.
      tree: the default tree, as for `--tree`. "auto" is a tree file's, as fits this device, or without
        one follows the drafts that were right so far (`api/automatic.py`).
      dtype: the type to compute in; by default float32 on CPU and bfloat16 elsewhere. On a CPU with
        native products "bfloat16" rounds the stored parameters and computes in float32. "float64"
        needs JAX's 64-bit types, which the caller enables for the whole process.
      weights: type of stored kernels, by default `dtype`. "stored" reads the blocks of a GGUF file
        unchanged: the default for such a file if possible (`dtype` float32 on one CPU with a C++
        compiler). "float32" unpacks them. "bfloat16" or "int8" rounds the
        weights: a step reads fewer bytes, and the model is the one with rounded weights.
      draft_weights: "float32", "bfloat16" or "int8", the type of the draft heads' kernels. By default
        int8 on a CPU with native products, while only speed depends on them; the first call with an
        acceptance rule whose text depends on the drafts (typical, rejection) reads the heads again,
        as wide as `weights`.
      activations: bits, 16 or 8, of the activations that native products with stored or int8 weights
        round to, with a scale for 32 of them. 16 give the text of float32 up to rare near ties, 8 are
        llama.cpp's precision.
      mesh: devices along data, fsdp, tensor.
      tokenizer: directory or hub id, if not next to the model. A model without any takes
        prompts as token ids and gives token ids.
      batch: rows to be decoded at a time; "auto" begins with the tree for this number.
      all_heads: False reads only the heads that `tree` uses.
      no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and text; 0 bars nothing; by
        default `no_repeat_ngram_size` of the model's generation_config.json, else 0.
      eos_ids: tokens that end a text unless a request names others; by default from the model's and
        the tokenizer's files.
      allow_other_base: accept heads that were trained on another backbone of the same sizes:
        fewer drafts are accepted, the text stays the backbone's own.
      kernels: the operations that differ by platform, by default the fastest (`kernels/choose.py`).

    Raises:
      UserError: anything that cannot be read or does not fit together.
    """
    model_path, heads_path, tokenizer_path = (
        None if path is None else fspath(path) for path in (model, drafter, tokenizer)
    )
    between("batch", batch, 1, 2**31)
    kind = _checked_dtype(dtype or default_dtype())
    directory = find_model(model_path)
    name = heads_path or default_drafter(model_path)
    baseline = None
    if name.partition(":")[0] in BASELINES:  # the drafter's name chooses
        baselines = importlib.import_module("medusa_jax.api.baselines")
        baseline = baselines.find_baseline(name, bundled_draft_model(model_path))
    stored = None if baseline else find_heads(model_path, name)
    devices = make_mesh(mesh)
    if tokenizer_path or has_tokenizer(directory):
        text_to_ids = load_tokenizer(tokenizer_path or directory)
    else:
        text_to_ids = NoTokenizer(directory)
    opened = hf.BaseFiles.open(directory)
    head_dim = opened.config.head_dim
    asked = kernels
    kernels = asked or choose_kernels(devices, kind, head_dim)
    weights = _weights(weights, directory, kind, kernels)
    number, storage = _forms(kernels, kind, devices, weights, draft_weights, activations)
    if number != kind:  # the engine's type instead of bfloat16
        kernels = asked or choose_kernels(devices, number, head_dim)
    marks = Fingerprint()
    drafting = _DraftHead(stored, devices, storage.of_drafts, kernels)

    def place(config: LlamaConfig, part: Params) -> Params:
        marks.update(config, part)
        drafting.see(config, part)
        return place_part(config, part, number, devices, storage, kernels)

    in_blocks = storage.weights == STORED
    config, backbone = hf.load_backbone(directory, devices, kind, place, in_blocks, opened)
    heads = HeadsConfig(n_heads=1, lm_head="shared")
    head_params: Params = {}
    read_wide: Callable[[], Params] | None = None
    timing = str(number), kernels.mark, tuple(devices.shape.values())
    where = batch, storage, timing
    if baseline is not None:
        heads, head_params = baselines.load_baseline(
            baseline, text_to_ids, number, devices, storage, kernels
        )
        chosen = TreeChoice.of(tree, make_drafter(heads, config), "", *where)
    elif stored is None:
        chosen = TreeChoice(Tree.none() if tree == "auto" else tree)
    else:
        described = make_drafter(stored.heads, config)
        chosen = TreeChoice.of(tree, described, stored.directory, *where)
        read = partial(
            heads_io.load_heads,
            stored,
            config,
            devices,
            None if all_heads else chosen.levels,
            number.name,
            fingerprint=fingerprint_as_read(model_path or directory, marks, config, kind),
            allow_other_base=allow_other_base,
        )
        place_narrow = partial(place_head, form=storage.of_drafts, kernels=kernels)
        heads, head_params, _ = read(convert=place_narrow)
        head_params = drafting.with_lm_head(head_params)
        if storage.of_drafts != storage.of_deciding_drafts:
            wide = _DraftHead(stored, devices, storage.of_deciding_drafts, kernels)
            read_wide = partial(_read_wide, read, wide, directory, kind)
    if eos_ids is None:
        eos_ids = sorted(text_to_ids.eos_ids | declared_eos_ids(directory))
    return Model(
        config,
        {"backbone": backbone, "heads": head_params},
        text_to_ids,
        make_drafter(heads, config),
        dtype=number,
        mesh=devices,
        storage=storage,
        kernels=kernels,
        tree=chosen.tree,
        calibrated=chosen.calibrated,
        ladder=chosen.ladder,
        automatic=chosen.automatic,
        eos_ids=eos_ids,
        no_repeat_ngram_size=_ngram_size(directory, no_repeat_ngram_size),
        fingerprint=marks.hexdigest(config),
        read_wide=read_wide,
    )


def _checked_dtype(dtype: str) -> str:
    one_of("dtype", dtype, DTYPES)
    if dtype == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise UserError(
            'dtype float64 needs 64-bit types: call jax.config.update("jax_enable_x64", True) '
            "before anything is loaded, or set JAX_ENABLE_X64=1"
        )
    return dtype


def _weights(asked: str | None, directory: str, dtype: str, kernels: Kernels) -> str | None:
    """How to store weights: by default the blocks of a GGUF file unchanged, if possible.

    Raises:
      UserError: "stored" was requested for a file without blocks or another type than float32.
    """
    blocks = stands_for_gguf(directory)
    if asked == STORED and not (blocks and dtype == "float32"):
        what = "dtype float32" if blocks else "a GGUF file"
        raise UserError(f"weights as they are stored need {what}")
    if asked not in (None, STORED) or not blocks or dtype != "float32":
        return asked
    if kernels.panel:
        return STORED
    inform(
        "the file's weights are unpacked: reading them as stored needs one CPU and a C++ compiler"
    )
    return None


def _forms(
    kernels: Kernels,
    dtype: str,
    mesh: Mesh,
    weights: str | None,
    draft_weights: str | None,
    activations: int,
) -> tuple[np.dtype, Storage]:
    """The type to compute in, and the form of kernels (`placing.choose_storage`)."""
    number = jnp.dtype(dtype)
    storage = choose_storage(kernels, number, mesh, weights, draft_weights, activations)
    if storage.panel and dtype == "bfloat16":
        # The engine computes in float32, which is also faster in XLA.
        return jnp.dtype("float32"), replace(storage, weights=storage.weights or dtype)
    if draft_weights == "float32" and number.itemsize < 4:
        raise UserError(f"draft weights in float32 need dtype float32, not {dtype}")
    return number, storage


def _read_wide(
    read: Callable[..., Any], drafting: "_DraftHead", directory: str, dtype: str
) -> Params:
    """Read the draft heads again, as wide as the weights, with the LM head that they share."""
    convert = partial(place_head, form=drafting.form, kernels=drafting.kernels)
    _, params, _ = read(convert=convert)
    if drafting.ids_O is not None:
        base = BaseFiles.open(directory)
        entry = vocabulary.lm_head_entry(base.config)
        leaf = "embedding" if base.config.tie_embeddings else "kernel"
        part = {entry: {leaf: base.array(f"{entry}/{leaf}").astype(dtype)}}
        drafting.see(base.config, part)
    return drafting.with_lm_head(params)


class _DraftHead:
    """The backbone's LM head for the tokens of a draft vocabulary, where heads share it.

    Its columns are selected while the backbone is read, before kernels are converted to decoding form; the
    smaller kernel is then converted separately.
    """

    def __init__(
        self, stored: StoredHeads | None, mesh: Mesh, form: Storage, kernels: Kernels
    ) -> None:
        self.mesh, self.form, self.kernels = mesh, form, kernels
        self.part: Params = {}
        self.ids_O = None
        if stored is not None and stored.heads.lm_head == "shared":
            self.ids_O = stored.ids

    def see(self, config: LlamaConfig, part: Params) -> None:
        """Select the columns if this part of the backbone has the LM head."""
        entry = vocabulary.lm_head_entry(config)
        if self.ids_O is None or entry not in part:
            return
        [rows] = part[entry].values()
        if isinstance(rows, BlockRows):
            kernel_DO = jnp.asarray(rows.blocks.unpacked(self.ids_O).T)
            lm_head = {"lm_head": {"kernel": kernel_DO}}
            self.part = place_head(lm_head, self.form, self.kernels)
        else:
            where = self.mesh, self.form, self.kernels
            self.part = _scored(config, part, self.ids_O, *where)

    def with_lm_head(self, heads: Params) -> Params:
        """The parameters of the heads, with the LM head that they share."""
        if self.ids_O is None:
            return heads
        return heads | {vocabulary.GROUP: heads[vocabulary.GROUP] | self.part}


@partial(jax.jit, static_argnums=(0, 3, 4, 5))
def _scored(
    config: LlamaConfig,
    part: Params,
    ids_O: np.ndarray,
    mesh: Mesh,
    storage: Storage,
    kernels: Kernels,
) -> Params:
    """The LM head's columns of these tokens in a form, as one program."""
    kernel_DO = vocabulary.scored_columns(config, part, ids_O)
    found = {"lm_head": {"kernel": kernel_DO}}
    found = jax.lax.with_sharding_constraint(found, param_shardings(mesh, found))
    return store(found, storage, kernels)


def _ngram_size(directory: str, asked: int | None) -> int:
    """`no_repeat_ngram_size`, or the size that the model's publisher recommends."""
    if asked is None:
        asked = hf.generation_config(directory).get("no_repeat_ngram_size") or 0
    size: int = read("no_repeat_ngram_size", asked, int)
    between("no_repeat_ngram_size", size, 0, LONGEST_NGRAM)
    return size
