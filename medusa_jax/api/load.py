"""From files to a `Model`: the backbone, its tokenizer, its heads and their tree."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from medusa_jax.api import device_tree
from medusa_jax.api.baselines import find_baseline, load_baseline
from medusa_jax.api.model import Model
from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.heads import DRAFTERS, make_drafter, vocabulary
from medusa_jax.heads.draft_model import DraftModel
from medusa_jax.interop import heads_io, hf
from medusa_jax.interop.base_files import fingerprint_as_read
from medusa_jax.interop.hub import resolve
from medusa_jax.interop.names import named
from medusa_jax.interop.published import open_heads
from medusa_jax.interop.stored_heads import StoredHeads
from medusa_jax.interop.tokenizer import (
    NoTokenizer,
    declared_eos_ids,
    has_tokenizer,
    load_tokenizer,
)
from medusa_jax.model.forms import choose_storage
from medusa_jax.model.placing import place_head, place_part
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import make_mesh, param_shardings
from medusa_jax.tree import (
    Ladder,
    Tree,
    file_ladder,
    load_tree_file,
    parse_tree,
    tree_of_size,
)

DEMO = Path(__file__).parents[1] / "demo"
MODELS = Path(__file__).parents[1] / "models"
# A step compares so many tokens with each place of the text, each by an operation of its own.
LONGEST_NGRAM = 64
DTYPES = ("float64", "float32", "bfloat16", "float16")


def default_dtype() -> str:
    """float32 on a CPU (its bfloat16 products are slow), bfloat16 elsewhere."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def load(
    model: str | None = None,
    drafter: str | None = None,
    *,
    tree: str | Tree = "auto",
    dtype: str | None = None,
    weights: str | None = None,
    mesh: Sequence[int] = (1, 1, 1),
    tokenizer: str | None = None,
    batch: int = 1,
    all_heads: bool = True,
    no_repeat_ngram_size: int | None = None,
    eos_ids: Sequence[int] | None = None,
    allow_other_base: bool = False,
) -> Model:
    """Load a backbone and its draft heads. Without arguments: the bundled demo.

    Args:
      model: directory, GGUF file, name (`interop/names.py`) or hub id of a Llama-family model;
        None is the demo.
      drafter: a name from the registry (the heads of that kind that come with the demo or with
        a model called by name); a directory, a file or a hub id with heads, ours or published
        ones (docs/formats.md); a drafter without heads (`api/baselines.py`); or "none". By
        default what `default_drafter` says.
      tree: the default tree, as for `--tree`. "auto" is a ladder: what pays for `batch` rows,
        and for another number what is known to pay there, from this device (`calibrate`) or the
        tree file.
      dtype: what to compute in; by default float32 on CPU and bfloat16 elsewhere. On a CPU with
        native products "bfloat16" rounds and stores parameters so and computes in float32. "float64"
        needs JAX's 64-bit types, which are a switch of the whole process and the caller's.
      weights: "bfloat16" or "int8" stores kernels so, which makes a step's bytes fewer; the
        model is then the one with these rounded weights. By default they have the `dtype`.
      mesh: devices along data, fsdp, tensor.
      tokenizer: directory or hub id, if not beside the model. A model without any takes
        prompts as token ids and gives token ids.
      batch: rows that will be decoded at a time, which "auto" fits the tree to.
      all_heads: False reads only the heads that `tree` uses.
      no_repeat_ngram_size: no n-gram of this size twice in prompt and text, 0 bars nothing; by
        default `no_repeat_ngram_size` of the model's generation_config.json, else 0.
      eos_ids: tokens that end a text unless a request names others; by default those that
        the model's and the tokenizer's files name.
      allow_other_base: accept heads that were trained on another backbone of the same sizes:
        fewer drafts are accepted, the text stays the backbone's own.

    Raises:
      UserError: anything that cannot be read or does not fit together.
    """
    kind = dtype or default_dtype()
    if kind not in DTYPES:
        raise UserError(f"dtype is one of {', '.join(DTYPES)}, not {kind!r}")
    if kind == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise UserError(
            'dtype float64 needs 64-bit types: call jax.config.update("jax_enable_x64", True) '
            "before anything is loaded, or set JAX_ENABLE_X64=1"
        )
    directory = find_model(model, kind)
    name = drafter or default_drafter(model)
    baseline = find_baseline(name, bundled_draft_model(model))
    stored = None if baseline else find_heads(model, name)
    devices = make_mesh(mesh)
    if tokenizer or has_tokenizer(directory):
        text_to_ids = load_tokenizer(tokenizer or directory)
    else:
        text_to_ids = NoTokenizer(directory)
    marks, number = hf.Fingerprint(), jnp.dtype(kind)
    storage = choose_storage(hf.read_config(directory), number, devices, weights)
    if storage.panel and kind == "bfloat16":
        # The kernels compute in float32 whatever they read, and what is around them is quicker in it.
        number = jnp.dtype("float32")
        storage = replace(storage, weights=storage.weights or kind)
    drafting = _DraftHead(stored, devices, storage)

    def place(config: LlamaConfig, part: Any) -> Any:
        marks.see(config, part)
        drafting.see(config, part)
        return place_part(config, part, number, devices, storage)

    config, backbone = hf.load_backbone(directory, devices, kind, place)
    calibrated, measured = None, None
    ladder: Ladder | None = None
    heads = HeadsConfig(n_heads=1, lm_head="shared")
    head_params: Any = {}
    wanted: str | Tree
    if baseline is not None:
        heads, head_params = load_baseline(baseline, text_to_ids, number, devices, storage)
        wanted = _choose_tree(tree, None, make_drafter(heads, config).default_tree)
    elif stored is None:
        wanted = Tree.none() if tree == "auto" else tree
    else:
        calibrated = calibrated_tree(stored)
        there = stored.heads.n_heads
        if tree == "auto" and device_tree.is_measured(calibrated):
            about = (config, stored.heads, number, storage, devices)
            ladder = device_tree.known_ladder(calibrated, *about)
            measured = device_tree.kept_choice(calibrated, batch, *about)
            size = device_tree.kept_size(measured)
            if size is not None and device_tree.is_settled(measured):
                tree, measured = tree_of_size(calibrated["growth"], size), None
        elif calibrated and tree in ("auto", "bundled"):
            ladder = file_ladder(calibrated, jax.default_backend())
            tree = ladder.at(batch) if ladder else tree
        wanted = _choose_tree(tree, calibrated, Tree.chain(there))
        deepest = max(wanted.drafted.depth, ladder.depth if ladder else 0)
        wanted.check_depth(there)
        heads, head_params, _ = heads_io.load_heads(
            stored,
            config,
            devices,
            None if all_heads or measured else max(1, deepest),
            number.name,
            fingerprint=fingerprint_as_read(model or directory, marks, config, kind),
            allow_other_base=allow_other_base,
            convert=partial(place_head, storage=storage),
        )
        head_params = drafting.beside(head_params)
    if eos_ids is None:
        eos_ids = sorted(text_to_ids.eos_ids | declared_eos_ids(directory))
    loaded = Model(
        config,
        {"backbone": backbone, "heads": head_params},
        text_to_ids,
        make_drafter(heads, config),
        dtype=number,
        mesh=devices,
        storage=storage,
        tree=wanted,
        calibrated=calibrated,
        eos_ids=eos_ids,
        no_repeat_ngram_size=_ngram_size(directory, no_repeat_ngram_size),
    )
    if calibrated and measured:
        found = device_tree.choose_on_device(loaded, calibrated, batch, measured)
        loaded.tree = tree_of_size(calibrated["growth"], found["nodes"])
    loaded.ladder = ladder and ladder.having(batch, loaded.tree)
    return loaded


class _DraftHead:
    """The backbone's LM head for the tokens of a draft vocabulary, where heads share it.

    Its columns are picked while the backbone is read, before kernels get the form in which they are
    decoded, and get that form themselves: a smaller kernel, not a product with all columns.
    """

    def __init__(self, stored: StoredHeads | None, mesh: Mesh, storage: Storage) -> None:
        self.mesh, self.storage = mesh, storage
        self.part: Any = {}
        self.ids_O = None
        if stored is not None and stored.heads.lm_head == "shared":
            self.ids_O = stored.ids

    def see(self, config: LlamaConfig, part: Any) -> None:
        """Look at a part of the backbone as it passes."""
        if self.ids_O is None or vocabulary.lm_head_entry(config) not in part:
            return
        kernel_DO = vocabulary.scored_columns(config, part, self.ids_O)
        found = {"lm_head": {"kernel": kernel_DO}}
        found = jax.device_put(found, param_shardings(self.mesh, found))
        self.part = place_head(found, self.storage)

    def beside(self, heads: Any) -> Any:
        """The parameters of the heads, with the LM head that they share."""
        if self.ids_O is None:
            return heads
        return heads | {vocabulary.GROUP: heads[vocabulary.GROUP] | self.part}


def default_drafter(model: str | None) -> str:
    """The heads that go with a model when none are named: those of the demo, those that a name
    brings with it, else "none".
    """
    if model is None:
        return "hydra"
    row = named(model)
    return row.drafter if row and (MODELS / row.heads / row.drafter).is_dir() else "none"


def bundled_heads(model: str | None) -> list[str]:
    """The drafters whose heads come with a model: with the demo (None) or one called by name."""
    folder = _bundle(model)
    return [name for name in DRAFTERS if folder and (folder / name).is_dir()]


def bundled_draft_model(model: str | None) -> str:
    """The directory of the draft model that comes with a model, "" if none does."""
    folder = _bundle(model)
    found = folder and folder / DraftModel.name
    return str(found) if found and found.is_dir() else ""


def _bundle(model: str | None) -> Path | None:
    """Where that lies which comes with the demo (None) or a model called by name."""
    row = named(model)
    return MODELS / row.heads if row else None if model else DEMO


def find_model(model: str | None, dtype: str = "float32") -> str:
    """Where the backbone lies, before anything else is looked for; None is the demo's.

    Args:
      dtype: what a GGUF file is converted to.

    Raises:
      UserError: nowhere.
    """
    if model is not None:
        return resolve(model, dtype=dtype)
    if not (DEMO / "backbone" / "config.json").exists():
        raise UserError("this installation has no demo model: give --model")
    return str(DEMO / "backbone")


def find_heads(model: str | None, drafter: str) -> StoredHeads | None:
    """The heads that `drafter` names, described and not read; None for "none".

    Raises:
      UserError: there are none.
    """
    if drafter == "none":
        return None
    if drafter not in DRAFTERS:
        return open_heads(drafter)
    row = named(model)
    if model is not None and row is None:
        raise UserError(
            f"--drafter {drafter} names the demo's heads, which do not fit {model}: give "
            "the directory, file or hub id of heads trained for it, or --drafter none"
        )
    folder = (_bundle(model) or DEMO) / drafter
    if not folder.is_dir():
        raise UserError(
            f"no {drafter} heads are bundled with {model or 'the demo'}: give --drafter the "
            "directory of heads trained for it"
        )
    return open_heads(str(folder))


def calibrated_tree(stored: StoredHeads) -> dict[str, Any] | None:
    """The tree file beside the heads, if there is one."""
    file = Path(stored.directory) / "tree.json"
    return load_tree_file(file) if file.exists() else None


def _choose_tree(
    spec: str | Tree, calibrated: dict[str, Any] | None, default: Tree
) -> Tree:
    """The one choice of the default tree, made before heads are read: it says how many.

    Args:
      default: "auto" without a tree file.
    """
    if isinstance(spec, Tree):
        return spec
    if spec == "auto" and calibrated is None:
        return default
    return parse_tree(spec, calibrated, jax.default_backend())


def _ngram_size(directory: str, asked: int | None) -> int:
    """`no_repeat_ngram_size`, or what the model's publisher recommends."""
    size = asked
    if size is None:
        size = hf.generation_config(directory).get("no_repeat_ngram_size") or 0
    if type(size) is not int or not 0 <= size <= LONGEST_NGRAM:
        raise UserError(
            f"no_repeat_ngram_size must be 0 (off) to {LONGEST_NGRAM}, not {size!r}"
        )
    return size
