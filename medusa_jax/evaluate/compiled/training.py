"""Compile a recipe's training step for devices that are not here."""

import copy
import dataclasses
from typing import Any

from medusa_jax.config import Config
from medusa_jax.evaluate.compiled.targets import Target
from medusa_jax.evaluate.compiled.text import read_program
from medusa_jax.evaluate.compiled.warnings import step_warnings
from medusa_jax.training import dry


def compile_training(
    cfg: Config, target: Target, mesh: tuple[int, int, int], layers: int = 0
) -> dict[str, Any]:
    """Memory and traffic of each device for the recipe's step.

    Args:
      mesh: of the target's devices; one axis may be -1.
      layers: layers that are compiled, 0: all. The stored memory of the others is added; traffic is
        that of these layers.

    Returns: `memory_bytes` by the compiler, `sent_bytes` by collective, `counted_bytes` that a step is given
      (parameters, moments, batch), `warnings`.

    Raises:
      UserError: sizes that do not fit together.
    """

    def of(n_layers: int) -> tuple[Config, dry.Shapes]:
        few = copy.deepcopy(cfg)
        few.model.path = few.train.heads_path = ""
        few.model.arch = dataclasses.replace(cfg.model.arch, n_layers=n_layers)
        few.mesh, few.dry_run = mesh, True
        return few, dry.step_shapes(few, target.devices)

    def stored(n_layers: int) -> int:
        return sum(dry.sizes(of(n_layers)[1])["stored"].values())

    n_layers = cfg.model.arch.n_layers
    compiled = min(layers or n_layers, n_layers)
    few, shapes = of(compiled)
    program = dry.compile_step(*shapes)
    found = dry.figures(few, program)
    return {
        "layers": compiled,
        "memory_bytes": found["total_bytes"] + stored(n_layers) - stored(compiled),
        "sent_bytes": found["sent_bytes"],
        "counted_bytes": stored(n_layers),
        "warnings": step_warnings(
            read_program(program.as_text() or ""), cfg.train.dtype, target.platform
        ),
    }
