"""`python -m medusa_jax convert`: draft heads from one layout to another.

Reads heads of this project and published ones (`files/layouts/heads_io.py`), writes what other engines
load (`files/layouts/convert.py`); docs/formats.md has the keys of each layout.
"""

import dataclasses

from medusa_jax.arch import DTYPES
from medusa_jax.commands.flags import Program, flag
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.files.layouts.engines import ENGINES
from medusa_jax.files.layouts.registry import TARGETS

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


LAYOUTS = "\n".join(f"  {name:13} {t.purpose}" for name, t in TARGETS.items())
EXAMPLES = f"""layouts to write:
{LAYOUTS}

engines, and the layouts that they load (docs/formats.md has the limits):
{table()}

examples:
  python -m medusa_jax convert --drafter medusa --to tgi --out work/heads_tgi    # the demo's
  python -m medusa_jax convert --model lmsys/vicuna-7b-v1.3 \\
      --drafter FasterDecoding/medusa-vicuna-7b-v1.3 --to native --out heads
  python -m medusa_jax convert --drafter medusa --to my_layouts:Mine --out out   # a class of yours
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
        "default: as they are stored; int8 (a byte a weight) for --to native",
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
    from medusa_jax.files.layouts.convert import convert
    from medusa_jax.files.layouts.layout import Export

    if flags.dtype == "int8" and flags.to != "native":
        raise UserError("--dtype int8 is for --to native: no other engine reads it")
    directory = find_model(flags.model)
    heads = find_heads(flags.model, flags.drafter)
    if heads is None:
        raise UserError("give --drafter the heads to convert")
    name = flags.base_name or flags.model or directory
    export = Export(heads, BaseFiles.open(directory), name, flags.dtype)
    inform(f"{heads.source}: {heads.layout}, {heads.heads.n_heads} heads")
    target = convert(export, flags.to, flags.out, allow_other_base=flags.allow_other_base)
    note = "" if target == flags.to else f" as --to {target}, the same for these heads"
    inform(f"wrote {flags.out}{note}\nnext: load it as {flags.out}/README.md says")
    return 0


main = Program("python -m medusa_jax convert", Flags, run, EXAMPLES)
