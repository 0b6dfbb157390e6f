"""`medusa convert`: draft heads from one layout to another.

Reads heads of this project and published ones (`files/layouts/heads_io.py`), writes what other engines
load (`files/layouts/convert.py`); docs/formats.md has the keys of each layout.
"""

import dataclasses
import os

from medusa_jax.arch import DTYPES
from medusa_jax.commands.flags import CommandLine, flag
from medusa_jax.commands.next_command import print_next
from medusa_jax.commands.verify import certify
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.files.known import named_model
from medusa_jax.files.layouts.engines import ENGINES
from medusa_jax.files.layouts.registry import TARGETS
from medusa_jax.whole_files import Json

# The columns of `table`.
FAMILIES = {
    "Medusa": "medusa",
    "Hydra, Hydra++": "hydra",
    "Amphista": "amphista",
    "EAGLE-1": "eagle",
    "EAGLE-3": "eagle3",
    "DFlash, DSpark": "dflash",
}


def table() -> str:
    """The targets by engine and family, as a Markdown table."""
    rows = []
    for name, engine in ENGINES.items():
        rows.append([name, *(", ".join(engine.get(x, "-")) for x in FAMILIES.values())])
    return markdown_table(("", *FAMILIES), rows)


LAYOUTS = "\n".join(f"  {name:14} {t.purpose}" for name, t in TARGETS.items())
EXAMPLES = f"""layouts to write:
{LAYOUTS}

engines, and the layouts that they load (docs/formats.md has the limits):
{table()}

examples:
  medusa convert --drafter medusa --to tgi --out work/heads_tgi    # the demo's
  medusa convert --model lmsys/vicuna-7b-v1.3 \\
      --drafter FasterDecoding/medusa-vicuna-7b-v1.3 --to native --out heads
  medusa convert --drafter medusa --to my_layouts:Mine --out out   # a class of yours
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Convert draft heads from one layout to another."""

    model: str | None = flag("directory or hub id of their model (default: the demo)", None)
    drafter: str = flag("heads: a name, a directory, a file or a hub id")
    to: str = flag(
        "the layout to write: one of those below or of an installed package (entry point "
        "medusa_jax.layouts), or module:Class, a subclass of `Layout`"
    )
    out: str = flag("new directory")
    dtype: str = flag(
        "default: as they are stored for --to native, else 16 bits, which all other engines compute in; "
        "int8 (a byte a weight) for --to native",
        "",
        choices=(*DTYPES[1:], "int8"),
    )
    base_name: str | None = flag("hub id of their model (default: --model)", None)
    allow_other_base: bool = flag(
        "take heads that were trained on another model of the same sizes", False
    )


def run(flags: Flags) -> int:
    from medusa_jax.api import find_heads, find_model
    from medusa_jax.files.hf import BaseFiles
    from medusa_jax.files.json_files import optional_json
    from medusa_jax.files.layouts.convert import convert
    from medusa_jax.files.layouts.layout import Export
    from medusa_jax.files.tensors import stands_for_gguf

    if flags.dtype == "int8" and flags.to != "native":
        raise UserError("--dtype int8 is for --to native: no other engine reads it")
    directory = find_model(flags.model)
    heads = find_heads(flags.model, flags.drafter)
    if heads is None:
        raise UserError("give --drafter the heads to convert")
    # Engines open a path from where they are started.
    elsewhere = None if os.path.isdir(flags.model or "") else flags.model
    name = flags.base_name or elsewhere or os.path.abspath(directory)
    config = optional_json(os.path.join(directory, "config.json"))
    if flags.to != "native":
        name = public_name(name, config)
    export = Export(heads, BaseFiles.open(directory), name, flags.dtype)
    if not flags.dtype and flags.to != "native" and export.kind.itemsize > 2:
        is_float16 = "float16" in (config.get("dtype"), config.get("torch_dtype"))
        kind = "float16" if is_float16 else "bfloat16"
        export = dataclasses.replace(export, dtype=kind)
    inform(f"{heads.source}: {heads.layout}, {heads.heads.n_heads} heads")
    layout = convert(export, flags.to, flags.out, allow_other_base=flags.allow_other_base)
    is_other = layout.name != flags.to
    note = f" as --to {layout.name}, the same for these heads" if is_other else ""
    inform(f"wrote {flags.out}{note}")
    try:
        # Of the heads before they are written, so that it shows a wrong writer; int8 exists in the file alone.
        is_int8 = flags.dtype == "int8"
        source, kind = (flags.out, "") if is_int8 else (flags.drafter, export.kind.name)
        certify(flags.model, source, flags.out, kind)
    except UserError as error:
        inform(f"no certificate was written: {error}")
        print_next("verify", model=flags.model, drafter=flags.out, write="")
    if stands_for_gguf(directory) and flags.to != "native":
        inform(
            f"the heads were trained on a GGUF file's weights: serve the checkpoint that it was made from "
            f"({name}), where slightly fewer guesses may be accepted"
        )
    inform(f"loading: {layout.how_to_load(heads.heads, name, flags.out)}")
    return 0


def public_name(name: str, config: Json) -> str:
    """What other engines call a model: an id without a revision; for GGUF the original, as far as it is known."""
    if row := named_model(name):
        return row.origin
    if name.lower().endswith(".gguf"):
        return str(config.get("_name_or_path") or os.path.basename(name))
    return name if os.path.exists(name) else name.partition("@")[0]


main = CommandLine("medusa convert", Flags, run, EXAMPLES)
