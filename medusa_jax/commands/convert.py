"""`python -m medusa_jax convert`: draft heads from one layout to another.

Reads heads of this project and published ones (`interop/published.py`), writes what other engines
load (`interop/export_heads.py`); docs/formats.md has the keys of each layout.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from medusa_jax.commands.flags import command, run_command
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.interop.export_heads import TARGETS, convert

DTYPES = ("float32", "bfloat16", "float16", "int8")
EXAMPLES = """examples:
  python -m medusa_jax convert --drafter medusa --to tgi --out work/heads_tgi    # the demo's
  python -m medusa_jax convert --model lmsys/vicuna-7b-v1.3 \\
      --drafter FasterDecoding/medusa-vicuna-7b-v1.3 --to native --out heads
  python -m medusa_jax convert --model runs/m2/export --drafter runs/m2/export/heads \\
      --to merged --dtype bfloat16 --out merged
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """All flags."""

    model: str | None
    drafter: str
    to: str
    out: str
    dtype: str
    base_name: str | None
    bench: str | None
    push: str | None
    allow_other_base: bool


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command(
        "python -m medusa_jax convert",
        "Draft heads from one layout to another. Layouts to write:\n"
        + "\n".join(f"  {name:13} {target.purpose}" for name, target in TARGETS.items()),
        EXAMPLES,
    )
    p.add_argument("--model", help="directory or hub id of their model (default: the demo)")
    p.add_argument(
        "--drafter",
        required=True,
        help="heads: a name (the demo's), a directory, a file or a hub id",
    )
    p.add_argument("--to", required=True, choices=list(TARGETS), help="the layout to write")
    p.add_argument("--out", required=True, help="new directory")
    p.add_argument(
        "--dtype",
        choices=DTYPES,
        default="",
        help="default: as they are stored; int8 (a byte a weight) for --to native",
    )
    p.add_argument(
        "--base_name", help="what the files call the model (default: what --model says)"
    )
    p.add_argument("--bench", help="race.json of `bench race`, for the model card")
    p.add_argument("--push", metavar="OWNER/NAME", help="upload the result to the hub")
    p.add_argument(
        "--allow_other_base",
        action="store_true",
        help="take heads that were trained on another model of the same sizes",
    )
    return p


def run(flags: Flags) -> int:
    """Convert, and upload if asked to."""
    from medusa_jax.api import find_heads, find_model
    from medusa_jax.interop.base_files import BaseFiles
    from medusa_jax.interop.hub import push
    from medusa_jax.interop.stored_heads import Export
    from medusa_jax.interop.tensors import read_json

    if flags.dtype == "int8" and flags.to != "native":
        raise UserError(
            f"--dtype int8 is for --to native: no other engine reads it, nor {flags.to}"
        )
    bench = read_json(flags.bench) if flags.bench else None
    directory = find_model(flags.model)
    stored = find_heads(flags.model, flags.drafter)
    if stored is None:
        raise UserError("give --drafter the heads to convert")
    name = flags.base_name or flags.model or directory
    export = Export(stored, BaseFiles.open(directory), name, flags.dtype)
    inform(f"{stored.source}: {stored.layout}, {stored.heads.n_heads} heads")
    convert(
        export, flags.to, flags.out, bench=bench, allow_other_base=flags.allow_other_base
    )
    inform(f"wrote {flags.out}: {TARGETS[flags.to].purpose}")
    if flags.push:
        push(flags.out, flags.push)
        inform(f"uploaded to https://huggingface.co/{flags.push}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), Flags, run, argv)


if __name__ == "__main__":
    sys.exit(main())
