"""Compile a recipe's training step for devices that are not here."""

import copy
import dataclasses
from typing import Any

from medusa_jax.config import Config
from medusa_jax.evaluate.compiled.targets import Target
from medusa_jax.evaluate.compiled.text import read_program
from medusa_jax.evaluate.compiled.warnings import step_warnings
from medusa_jax.training import dry

# Numbers of layers that are compiled. Traffic is on the line through both. Memory is that of each, with the
# counted bytes of the other layers: a line would extend the gaps of the compiler's arena, too.
FEW = (2, 4)


def compile_training(
    cfg: Config, target: Target, mesh: tuple[int, int, int]
) -> dict[str, Any]:
    """Memory and traffic of each device for the recipe's whole model.

    Args:
      mesh: of the target's devices; one axis may be -1.

    Returns: `memory_bytes` by the larger and `memory_bytes_from_fewer` by the smaller program,
      `sent_bytes` by collective, `counted_bytes` as the dry run counts them, `warnings`.

    Raises:
      UserError: sizes that do not fit together.
    """

    def of(n_layers: int) -> tuple[Config, dry.Shapes]:
        few = copy.deepcopy(cfg)
        few.model.path = few.train.heads_path = ""
        few.model.arch = dataclasses.replace(cfg.model.arch, n_layers=n_layers)
        few.mesh, few.dry_run = mesh, True
        return few, dry.step_shapes(few, target.devices)

    def compiled(n_layers: int) -> tuple[dict[str, Any], str]:
        few, shapes = of(n_layers)
        program = dry.compile_step(*shapes)
        return dry.figures(few, program), program.as_text() or ""

    def counted(n_layers: int) -> int:
        found = dry.training_bytes(*of(n_layers))
        return sum(n for name, n in found.items() if name != dry.COPIES)

    (few, text), (more, _) = map(compiled, FEW)
    n_layers = cfg.model.arch.n_layers
    steps = (n_layers - FEW[0]) / (FEW[1] - FEW[0])
    all_bytes = counted(n_layers)
    sent = {
        kind: a + steps * (more["sent_bytes"].get(kind, 0) - a)
        for kind in few["sent_bytes"] | more["sent_bytes"]
        for a in [few["sent_bytes"].get(kind, 0)]
    }
    return {
        "memory_bytes": more["total_bytes"] + all_bytes - counted(FEW[1]),
        "memory_bytes_from_fewer": few["total_bytes"] + all_bytes - counted(FEW[0]),
        "sent_bytes": sent,
        "counted_bytes": all_bytes,
        "warnings": step_warnings(read_program(text), cfg.train.dtype),
    }
