"""`python -m medusa_jax compile`: what the compiler of an accelerator makes of a decode step.

TPUs and GPUs need not be here: their compilers run anywhere. A model of shapes only is compiled, and
the compiler's own estimates are added up by stage. Nothing is run, so these are estimates.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from medusa_jax.commands.flags import at_least, command, parse_mesh, run_command
from medusa_jax.console import announced
from medusa_jax.errors import UserError
from medusa_jax.interop.shapes import SHAPES, find_shape

EXAMPLES = """examples:
  python -m medusa_jax compile --for v5e
  python -m medusa_jax compile --for v6e:2x2 --drafter eagle --acceptance sampled --top_p 0.9
  python -m medusa_jax compile --for h100 --shape llama3-8b --drafter medusa --json
  python -m medusa_jax compile --for v5e:2x4 --train configs/vicuna7b_m1.py
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """All flags."""

    target: str
    shape: str
    drafter: str
    tree: int
    batch: int
    context: int
    mesh: tuple[int, int, int] | None
    acceptance: str
    top_p: float
    layers: int
    train: str | None
    json: bool


def parser() -> argparse.ArgumentParser:
    """All flags."""
    p = command(
        "python -m medusa_jax compile",
        "Memory, cycles by stage and defects of a decode step, by an accelerator's compiler.",
        EXAMPLES,
    )
    p.add_argument("--for", dest="target", required=True, metavar="DEVICES",
                   help="v4, v5e, v5p or v6e, with a topology such as v5e:2x4; or h100")  # fmt: skip
    p.add_argument("--shape", default="llama-7b",
                   help=f"{', '.join(SHAPES)}, or a config.json or its directory")  # fmt: skip
    p.add_argument("--drafter", default="medusa", help="medusa, hydra, hydrapp, amphista, "
                   "amphista_alpha, eagle, or none")  # fmt: skip
    p.add_argument("--tree", type=at_least(1), default=64, help="nodes, root included")
    p.add_argument("--batch", type=at_least(1), default=1, help="rows")
    p.add_argument("--context", type=at_least(1), default=900, help="tokens of each row")
    p.add_argument("--mesh", type=parse_mesh, help="data,fsdp,tensor (default: 1,1,1; of a "
                   "recipe: its own)")  # fmt: skip
    p.add_argument("--acceptance", default="greedy",
                   help="greedy, sampled, rejection or typical")  # fmt: skip
    p.add_argument("--top_p", type=float, default=1.0,
                   help="below 1: the filter runs (its cost does not depend on the value)")  # fmt: skip
    p.add_argument("--layers", type=at_least(2), default=8,
                   help="layers to compile; figures are for all layers of the shape")  # fmt: skip
    p.add_argument("--train", metavar="CONFIG",
                   help="instead: the training step of a recipe")  # fmt: skip
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def run(flags: Flags) -> int:
    """Compile, then print."""
    import jax

    from medusa_jax.evaluate.compiled.targets import find_target

    jax.config.update("jax_platforms", "cpu")  # the TPU plugin would look for a TPU
    target = find_target(flags.target)
    if flags.train:
        return train(flags, target)
    from medusa_jax.api import DEMO
    from medusa_jax.decoding.acceptance import RULES
    from medusa_jax.evaluate.compiled import report
    from medusa_jax.evaluate.compiled.programs import Case
    from medusa_jax.heads import drafter_class, make_drafter
    from medusa_jax.model.llama import decoding_config
    from medusa_jax.tree import Tree, load_tree_file
    from medusa_jax.tree.files import tree_of_size

    if flags.acceptance not in RULES:
        raise UserError(
            f"--acceptance is one of {', '.join(RULES)}, not {flags.acceptance!r}"
        )
    config = find_shape(flags.shape)
    case = Case(
        config, target, flags.batch, flags.context, flags.mesh or (1, 1, 1),
        flags.acceptance, ("top_p",) if flags.top_p < 1 else (), layers=flags.layers,
    )  # fmt: skip
    plain = flags.drafter == "none"
    kind = drafter_class("medusa" if plain else flags.drafter)
    if not kind.trained:
        raise UserError(f"--drafter {flags.drafter} has no heads to compile")
    # The growth order of the demo's Hydra heads: as deep as the papers' trees, four levels.
    growth = load_tree_file(DEMO / "hydra" / "tree.json")["growth"]
    tree = Tree.none() if plain else tree_of_size(growth, flags.tree)
    drafter = make_drafter(
        kind.Config(drafter=kind.name, n_heads=4), decoding_config(config)
    )
    with announced(f"compiling for {target.name}"):
        steps = report.measure(case, drafter, tree)
    if flags.json:
        print(json.dumps(report.as_json(case, *steps)))
        return 0
    print(f"## {flags.shape}, {flags.drafter}, {tree.n_nodes} nodes, batch {flags.batch}, "
          f"{flags.context} tokens, {flags.acceptance}, {target.name}\n")  # fmt: skip
    print(report.as_text(case, *steps))
    print(f"\nestimates of {target.compiler}, jax {jax.__version__}; nothing was run")
    return 0


def train(flags: Flags, target: Any) -> int:
    """The training step of a recipe."""
    import jax

    from medusa_jax.commands.train import load_config
    from medusa_jax.evaluate.compiled import report
    from medusa_jax.evaluate.compiled.training import compile_training

    assert flags.train is not None
    cfg = load_config(flags.train)
    with announced(f"compiling for {target.name}"):
        found = compile_training(cfg, target, flags.mesh or cfg.mesh)
    if flags.json:
        print(json.dumps(report.training_json(target, found)))
        return 0
    print(f"## {flags.train}, {target.name}\n")
    print(report.training_text(target, found))
    print(f"\nestimates of {target.compiler}, jax {jax.__version__}; nothing was run")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(parser(), Flags, run, argv)


if __name__ == "__main__":
    sys.exit(main())
