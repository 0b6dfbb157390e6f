"""`python -m research compile`: cycles, kernels and inefficiencies of a step, by a device's compiler.

As `python -m medusa_jax compile`, with the compiler's estimates of a decode step added up by stage.
Extrapolated from 8 layers, figures are within 2% of all layers compiled; from 2, within 7%.
"""

import dataclasses
import json

from medusa_jax.commands import compile as base
from medusa_jax.commands.flags import Program, flag
from medusa_jax.commands.train import load_config
from medusa_jax.evaluate.compiled import compile_training
from research.compiled import report
from research.compiled.labelled import read_program
from research.compiled.warnings import step_warnings

EXAMPLES = """examples:
  python -m research compile --for v6e:2x2 --drafter eagle --acceptance sampled --top_p 0.9
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(base.Flags):
    """Memory, kernels or cycles by stage, and inefficiencies of a decode step."""

    top_p: float = flag(
        "below 1: the filter runs (its cost does not depend on the value)", 1.0
    )


def run(flags: Flags) -> int:
    """Compile, then print."""
    target = base.target_of(flags)
    if flags.train:
        cfg = load_config(flags.train)
        mesh = flags.mesh or cfg.mesh
        with base.compiling_for(target):
            program, found = compile_training(cfg, target, mesh)
        lines = read_program(program.as_text() or "")
        found["warnings"] = step_warnings(lines, cfg.train.dtype, target.platform)
        text = "\n".join(found["warnings"])
    else:
        case, drafter, tree = base.case_of(flags, target)
        filters = ("top_p",) if flags.top_p < 1 else ()
        with base.compiling_for(target):
            steps = report.measure(case, drafter, tree, filters)
        found, text = report.as_json(case, *steps), report.as_text(case, *steps)
    if flags.json:
        print(json.dumps(found))
    else:
        print(f"## {base.title_of(flags, target)}\n\n{text}\n\n{base.source_of(target)}")
    return 0


main = Program("python -m research compile", Flags, run, EXAMPLES)
