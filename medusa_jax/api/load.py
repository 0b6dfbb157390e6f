"""From files to a `Model`: the backbone, its tokenizer, its heads and their tree."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike, fspath

from medusa_jax.api.bundles import default_drafter, find_model, name_of
from medusa_jax.api.form import choose_form, default_dtype, product_forms, read_backbone
from medusa_jax.api.loaded_drafter import find_drafter, open_drafter
from medusa_jax.api.model import Model
from medusa_jax.api.prompts import check_tokens
from medusa_jax.api.tree_choice import TreeChoice
from medusa_jax.console import inform
from medusa_jax.decoding.request import begin_keys
from medusa_jax.errors import between
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.layouts.stored_heads import StoredHeads
from medusa_jax.files.text_defaults import TextDefaults, name_unapplied, text_defaults
from medusa_jax.kernels.choose import begin_loading
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import make_mesh
from medusa_jax.text.tokenizer import (
    NoTokenizer,
    Tokenizer,
    declared_eos_ids,
    has_tokenizer,
    load_tokenizer,
)
from medusa_jax.tree.tree import Tree
from medusa_jax.typed import checked_arguments, read

# Each n-gram token adds one comparison per position to a step.
LONGEST_NGRAM = 64


@checked_arguments()
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
    context: int | None = None,
    all_heads: bool = True,
    no_repeat_ngram_size: int | None = None,
    eos_ids: Sequence[int] | None = None,
    allow_other_base: bool = False,
    kernels: Kernels | None = None,
) -> Model:
    """Load a backbone and its draft heads. Without arguments: the bundled demo.

    Args:
      model: directory, GGUF file, name (`files/known.py`) or hub id of a Llama-family model;
        None is the demo.
      drafter: a kind of heads, such as "hydra", for the bundled heads of that kind; a directory, a file or a hub id
        with heads, ours or published ones (docs/formats.md); a drafter without heads (`api/baselines.py`); or
        "none". By default the result of `default_drafter`.
      tree: the default tree, as for `--tree`. "auto" is the tree file's for this device, or the drafter's default
        tree; where the text cannot depend on it, each step chooses a size of it (`decoding/tree_size/gate.py`).
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
      context: most tokens of a prompt and its text, by default the model's. Beyond the original context of LongRoPE
        all texts take its long factors.
      all_heads: False reads only the heads that `tree` uses.
      no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and text; 0 bars nothing; by
        default `no_repeat_ngram_size` of the model's generation_config.json, else 0. The file's
        `repetition_penalty` is the default of `Options`.
      eos_ids: tokens that end a text unless a request names others; by default from the model's and
        the tokenizer's files.
      allow_other_base: accept heads that were trained on another backbone of the same sizes:
        fewer drafts are accepted, the text stays the backbone's own.
      kernels: the operations that differ by platform, by default the fastest (`kernels/choose.py`).

    Raises:
      UserError: anything that cannot be read or does not fit together.
    """
    between("batch", batch, 1, 2**31)
    model_path = None if model is None else fspath(model)
    name = default_drafter(model_path) if drafter is None else fspath(drafter)
    source = find_drafter(model_path, name)
    devices = make_mesh(mesh)
    dtype = dtype or default_dtype()
    # The kernels load, or compile, and begin to read kept programs while the model is opened.
    if may_be_native := dtype != "float64" and kernels is None:
        begin_loading(devices)
    files = open_model(model_path, None if tokenizer is None else fspath(tokenizer))
    if may_be_native:
        forms = product_forms(files.base, dtype, weights)
        if isinstance(source, StoredHeads):
            forms.add(Storage(panel=1, draft_weights=draft_weights or "").of_drafts.weights)
        begin_loading(devices, forms, activations)
    name_unapplied(files.directory, files.defaults.unapplied)
    form = choose_form(
        files.base, devices, dtype, weights, draft_weights, activations, kernels
    )
    config = files.base.config
    check_tokens("eos_ids", eos_ids or (), config.vocab_size)
    if context is not None:
        between("context", context, 1, config.longest)
        config = replace(config, max_position=context)
    fingerprint = files.base.fingerprint()
    opened = open_drafter(
        source, files.base, files.tokenizer, form, devices,
        expected=None if allow_other_base else fingerprint,
    )  # fmt: skip
    trees = TreeChoice.of(tree, opened, batch, form, devices)
    with ThreadPoolExecutor(1) as pool:
        backbone = pool.submit(read_backbone, files.base, form, devices)
        if not form.storage.panel:  # the processes of several hosts read in the same order
            backbone.result()
        begin_keys()
        loaded = opened.with_params(None if all_heads else trees.levels)
    return Model(
        config,
        backbone.result(),
        loaded,
        files.tokenizer,
        form,
        devices,
        trees,
        name=name_of(model_path),
        eos_ids=files.eos_ids if eos_ids is None else eos_ids,
        no_repeat_ngram_size=files.ngram_size(no_repeat_ngram_size),
        repetition_penalty=files.defaults.repetition_penalty,
        fingerprint=fingerprint,
    )


@dataclass(frozen=True)
class ModelFiles:
    """An open model: its weights, read on demand, and its tokenizer.

    Attributes:
      directory: of the model.
      base: its shape and weights.
      tokenizer: `NoTokenizer` if there is none.
    """

    directory: str
    base: BaseFiles
    tokenizer: Tokenizer

    @property
    def eos_ids(self) -> list[int]:
        """Tokens that end a text, by the tokenizer's and the model's files."""
        return sorted(self.tokenizer.eos_ids | declared_eos_ids(self.directory))

    @cached_property
    def defaults(self) -> TextDefaults:
        """The publisher's defaults for texts."""
        return text_defaults(self.directory)

    def ngram_size(self, value: int | None) -> int:
        """`no_repeat_ngram_size`, or the size that the model's publisher recommends."""
        if value is None:
            value = self.defaults.no_repeat_ngram_size
        size: int = read("no_repeat_ngram_size", value, int)
        between("no_repeat_ngram_size", size, 0, LONGEST_NGRAM)
        return size


def open_model(model: str | None, tokenizer: str | None = None) -> ModelFiles:
    """Find and open a model and its tokenizer, the one that `tokenizer` names if given.

    Raises:
      UserError: not found, or not a Llama-family model.
    """
    directory = find_model(model)
    if tokenizer or has_tokenizer(directory):
        text_to_ids = load_tokenizer(tokenizer or directory)
    else:
        text_to_ids = NoTokenizer(directory)
    base = BaseFiles.open(directory)
    if text_to_ids.vocab_size > (size := base.config.vocab_size):
        inform(
            f"the tokenizer has {text_to_ids.vocab_size} ids, the model {size} embeddings: text with other "
            "tokens is refused"
        )
    return ModelFiles(directory, base, text_to_ids)
