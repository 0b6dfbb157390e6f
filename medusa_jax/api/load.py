"""From files to a `Model`: the backbone, its tokenizer, its heads and their tree."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from medusa_jax.api.model import Model
from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.heads import DRAFTERS, make_drafter
from medusa_jax.interop import heads_io, hf
from medusa_jax.interop.hub import resolve
from medusa_jax.interop.tokenizer import load_tokenizer
from medusa_jax.model.placing import place_head, place_part
from medusa_jax.sharding import make_mesh
from medusa_jax.tree import Tree, load_tree_file, parse_tree

DEMO = Path(__file__).parents[1] / "demo"
DTYPES = ("float64", "float32", "bfloat16", "float16")


def default_dtype() -> str:
    """float32 on a CPU (its bfloat16 products are slow), bfloat16 elsewhere."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def load(
    model: str | None = None,
    drafter: str = "hydra",
    *,
    tree: str | Tree = "auto",
    dtype: str | None = None,
    mesh: Sequence[int] = (1, 1, 1),
    tokenizer: str | None = None,
    all_heads: bool = True,
    no_repeat_ngram_size: int | None = None,
) -> Model:
    """Load a backbone and its draft heads. Without arguments: the bundled demo.

    Args:
      model: directory or hub id of a Llama-family model; None is the demo.
      drafter: a name from the registry (the demo's heads of that kind), a directory or a hub
        id with heads, or "none".
      tree: the default tree, as for `--tree`.
      dtype: what to compute in; by default float32 on CPU and bfloat16 elsewhere.
      mesh: devices along data, fsdp, tensor.
      tokenizer: directory or hub id, if not beside the model.
      all_heads: False reads only the heads that `tree` uses.
      no_repeat_ngram_size: no n-gram of this size twice in prompt and text, 0 bars nothing; by
        default `no_repeat_ngram_size` of the model's generation_config.json, else 0.

    Raises:
      UserError: anything that cannot be read or does not fit together.
    """
    kind = dtype or default_dtype()
    if kind not in DTYPES:
        raise UserError(f"dtype is one of {', '.join(DTYPES)}, not {kind!r}")
    if kind == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        jax.config.update("jax_enable_x64", True)
    path = model or str(DEMO / "backbone")
    if model is None and not (DEMO / "backbone" / "config.json").exists():
        raise UserError("this installation has no demo model: give --model")
    heads_path = drafter
    if drafter in DRAFTERS:
        if model is not None:
            raise UserError(
                f"--drafter {drafter} names the demo's heads, which do not fit {model}: give "
                "the directory or hub id of heads trained for it, or --drafter none"
            )
        heads_path = str(DEMO / drafter)
        if not Path(heads_path).is_dir():
            raise UserError(
                f"no {drafter} heads are bundled with the demo: give --drafter the directory of "
                "heads trained for it"
            )
    devices = make_mesh(mesh)
    text_to_ids = load_tokenizer(tokenizer or path)
    marks, number = hf.Fingerprint(), jnp.dtype(kind)

    def place(config: LlamaConfig, part: Any) -> Any:
        marks.see(config, part)
        return place_part(config, part, number, devices)

    config, base = hf.load_backbone(path, devices, kind, place)
    calibrated = None
    head_params: Any = {}
    if drafter == "none":
        heads = HeadsConfig(n_heads=1, lm_head="shared")
    else:
        directory = Path(resolve(heads_path, heads_io.HEAD_FILES))
        if (directory / "tree.json").exists():
            calibrated = load_tree_file(directory / "tree.json")
        n_heads = None
        if not all_heads and (tree != "auto" or calibrated is not None):
            wanted = tree if isinstance(tree, Tree) else parse_tree(tree, calibrated)
            n_heads = _heads_needed(directory, wanted)
        heads, head_params, _ = heads_io.load_heads(
            str(directory), config, devices, n_heads, kind, fingerprint=marks.digits(config),
            convert=partial(place_head, dtype=number, mesh=devices),
        )  # fmt: skip
    loaded = Model(
        config,
        {"base": base, "heads": head_params},
        text_to_ids,
        make_drafter(heads, config),
        dtype=number,
        mesh=devices,
        calibrated=calibrated,
        no_repeat_ngram_size=_ngram_size(path, no_repeat_ngram_size),
    )
    loaded.tree = loaded.parse_tree(tree)
    return loaded


def _ngram_size(path: str, asked: int | None) -> int:
    """`no_repeat_ngram_size`, or what the model's publisher recommends."""
    size = asked
    if size is None:
        size = hf.generation_config(path).get("no_repeat_ngram_size") or 0
    if not isinstance(size, int) or size < 0:
        raise UserError(f"no_repeat_ngram_size must be 0 (off) or more, not {size!r}")
    return size


def _heads_needed(directory: Path, tree: Tree) -> int:
    """How many heads the tree uses: deeper ones are not read. A too deep tree is refused."""
    tree.check_depth(heads_io.read_description(str(directory)).n_heads)
    return max(1, tree.depth)
