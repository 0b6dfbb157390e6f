"""Cycles, kernels and inefficiencies of a compiled decode step, next to the plain loop's."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from medusa_jax.devices.chips import Chip
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.heads.drafter import Drafter
from medusa_jax.heads.registry import no_drafter
from medusa_jax.notation import byte_size
from medusa_jax.tree.tree import Tree
from research.compiled.costs import Cost, bytes_read, kernels, of_all_layers, step_costs
from research.compiled.programs import Case, Step, compile_step
from research.compiled.readers import Program, read_program
from research.compiled.warnings import warnings_of


class Report(NamedTuple):
    """The output of the command: with `--json`, and without."""

    facts: dict[str, Any]
    text: str


@dataclass(frozen=True)
class Costs:
    """A compiled step and its costs, extrapolated to all layers of the model.

    Attributes:
      stages: cycles by stage; empty on a GPU.
      kernels: kernels of a step, instructions that move or compute on a TPU.
      read: bytes that the kernels of a step read; 0 on a TPU.
      program, costs: the compiled program of few layers.
    """

    step: Step
    stages: dict[str, float]
    kernels: int
    read: int
    program: Program
    costs: list[Cost]

    @property
    def cycles(self) -> float | None:
        """Cycles of a step; None without estimates."""
        return sum(self.stages.values()) or None

    def share_of_bound(self, chip: Chip) -> float | None:
        """Cycles of reading each weight once at peak bandwidth, over those of the step."""
        if self.cycles is None:
            return None
        return self.step.weights * chip.clock / chip.bandwidth / self.cycles


def cost_of(
    case: Case, drafter: Drafter, tree: Tree, filters: tuple[str, ...] = ()
) -> Costs:
    """Compile the decode loop and read its costs.

    Args:
      filters: `costs.FILTERS` that the rows use.
    """
    step = compile_step(case, drafter, tree)
    program = read_program(step.compiled.as_text() or "")
    chip, sizes = case.target.chip, (case.compiled_layers, case.config.n_layers)
    clock = chip.clock or math.inf  # without a clock nothing has an estimate
    costs = step_costs(program, chip.bandwidth / clock, chip.flops / clock, filters)
    return Costs(
        step,
        of_all_layers(costs, *sizes) if chip.clock else {},
        round(kernels(costs, *sizes)),
        0 if chip.clock else round(bytes_read(program, costs, *sizes)),
        program,
        costs,
    )


def measure(
    case: Case, drafter: Drafter, tree: Tree, filters: tuple[str, ...] = ()
) -> tuple[Costs, Costs]:
    """The plain step and the drafter's; the same one for the empty tree."""
    plain = cost_of(case, no_drafter(drafter.llama), Tree.none(), filters)
    return plain, cost_of(case, drafter, tree, filters) if tree.depth else plain


def as_json(case: Case, plain: Costs, drafted: Costs) -> dict[str, Any]:
    """The object that `--json` prints. Only TPUs have cycles, ratios and shares, else None."""
    chip, ratio = case.target.chip, None
    if plain.cycles is not None and drafted.cycles is not None:
        ratio = drafted.cycles / plain.cycles
    return {
        "target": case.target.name,
        "device": chip.title,
        "estimated": True,
        "layers": {"compiled": case.compiled_layers, "all": case.config.n_layers},
        "plain": {
            "cycles": plain.cycles,
            "share_of_bound": plain.share_of_bound(chip),
            "kernels": plain.kernels,
            "read_bytes": plain.read or None,
        },
        "step": {
            "cycles": drafted.cycles,
            "ratio": ratio,
            "share_of_bound": drafted.share_of_bound(chip),
            "stages": drafted.stages,
        },
        "kernels": drafted.kernels,
        "read_bytes": drafted.read or None,
        "weight_bytes": drafted.step.weights,
        "sent_bytes": drafted.step.sent,
        "memory_bytes": drafted.step.memory,
        "warnings": defects(case, plain, drafted),
    }


def defects(case: Case, *steps: Costs) -> list[str]:
    """The named warnings of these steps, each line once."""
    vocab_size, platform = case.config.vocab_size, case.target.platform
    warnings: dict[str, None] = {}
    for s in steps:
        size = s.step.cache_numbers
        lines = warnings_of(s.program, s.costs, vocab_size, size, platform)
        warnings |= dict.fromkeys(lines)
    return list(warnings)


def as_text(case: Case, plain: Costs, drafted: Costs) -> str:
    """The tables that the command prints without `--json`."""
    chip = case.target.chip
    parts = [memory_lines(as_json(case, plain, drafted), chip.memory)]
    if plain.cycles is not None and drafted.cycles is not None:
        rows = [
            (
                name,
                two_digits(cycles / 1e6),
                two_digits(cycles / plain.cycles),
                two_digits(1e3 * cycles / chip.clock),
                two_digits(cost.share_of_bound(chip) or 0),
            )
            for name, cost in (("plain", plain), ("with drafts", drafted))
            if (cycles := cost.cycles) is not None
        ]
        header = ("estimated", "million cycles", "of plain", "ms", "of the weight-read bound")  # fmt: skip
        stages = [(name, two_digits(n / 1e6)) for name, n in drafted.stages.items()]
        parts += [
            markdown_table(header, rows),
            markdown_table(("stage", "estimated million cycles"), stages),
        ]
    lines = [f"kernels a step     {drafted.kernels:,}; plain {plain.kernels:,}"]
    if drafted.read:
        lines.append(
            f"GB read a step     {drafted.read / 1e9:.1f}; plain {plain.read / 1e9:.1f}"
        )
    return "\n\n".join([*parts, "\n".join(lines)])


def memory_lines(facts: Mapping[str, Any], room: float) -> str:
    """Memory and traffic of a device, and the warnings.

    Args:
      facts: the object that `--json` prints.
      room: bytes of the device's memory; 0 if unknown.
    """
    memory = byte_size(facts["memory_bytes"])
    if room:
        fits = "" if facts["memory_bytes"] <= room else ": does NOT fit"
        memory += f" of {room / 1e9:.0f} GB{fits}"
    lines = {"memory per device": memory}
    if "weight_bytes" in facts:
        lines["weights of a step"] = byte_size(facts["weight_bytes"])
    if "stored_bytes" in facts:
        lines["stored"] = byte_size(facts["stored_bytes"])
    traffic = [f"{kind} {byte_size(n)}" for kind, n in facts["sent_bytes"].items()]
    lines["sent a step"] = ", ".join(traffic) or "nothing"
    lines["layers compiled"] = str(facts["layers"]["compiled"])
    text = [f"{name:18} {figure}" for name, figure in lines.items()]
    return "\n".join([*text, *(f"warning: {line}" for line in facts["warnings"])])


def two_digits(x: float) -> str:
    """1.16 is "1.2", 34.7 "35", 768 "770"."""
    places = 1 - math.floor(math.log10(abs(x))) if x else 0
    return f"{round(x, places):,.{max(0, places)}f}"
