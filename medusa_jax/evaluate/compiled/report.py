"""A decode step compiled for a device, next to the plain loop under the same options."""

import math
from collections.abc import Mapping
from typing import Any

from medusa_jax.evaluate.compiled.programs import Case, Step, compile_step
from medusa_jax.evaluate.compiled.targets import Target
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.heads.drafter import Drafter, NoDrafter
from medusa_jax.hlo.warnings import warnings_of
from medusa_jax.tree.tree import Tree


def measure(case: Case, drafter: Drafter, tree: Tree) -> tuple[Step, Step]:
    """The plain step and the drafter's; the same one for the empty tree."""
    plain = compile_step(case, NoDrafter(drafter.heads, drafter.llama), Tree.none())
    return plain, compile_step(case, drafter, tree) if tree.depth else plain


def as_json(case: Case, plain: Step, step: Step) -> dict[str, Any]:
    """The object that `--json` prints, unrounded. Only TPUs have cycles, ratios and shares, else None."""
    target = case.target
    ratio = None
    if plain.cycles is not None and step.cycles is not None:
        ratio = step.cycles / plain.cycles
    return {
        "target": target.name,
        "device": target.chip.title,
        "estimated": True,
        "layers": {
            "compiled": case.compiled_layers,
            "all": case.config.n_layers,
            "within": case.within,
        },
        "plain": {
            "cycles": plain.cycles,
            "share_of_bound": plain.share_of_bound(target),
            "kernels": plain.kernels,
            "read_bytes": plain.read or None,
        },
        "step": {
            "cycles": step.cycles,
            "ratio": ratio,
            "share_of_bound": step.share_of_bound(target),
            "stages": step.stages,
        },
        "kernels": step.kernels,
        "read_bytes": step.read or None,
        "sent_bytes": step.sent,
        "memory_bytes": step.memory,
        "warnings": defects(case, plain, step),
    }


def defects(case: Case, *steps: Step) -> list[str]:
    """The named warnings of these steps, each line once."""
    vocab_size, platform = case.config.vocab_size, case.target.platform
    found: dict[str, None] = {}
    for s in steps:
        lines = warnings_of(s.program, s.costs, vocab_size, s.cache_numbers, platform)
        found |= dict.fromkeys(lines)
    return list(found)


def as_text(case: Case, plain: Step, step: Step) -> str:
    """The text that the command prints without `--json`: of each figure the digits that are known."""
    target, lines, drafted = case.target, [], step is not plain
    if plain.cycles is not None and step.cycles is not None:
        rows = [
            (
                name,
                two_digits(cycles / 1e6),
                two_digits(cycles / plain.cycles),
                two_digits(1e3 * cycles / target.chip.clock),
                two_digits(one.share_of_bound(target) or 0),
            )
            for name, one in (("plain", plain), ("with drafts", step))
            if (cycles := one.cycles) is not None
        ]
        header = ("estimated", "million cycles", "of plain", "ms", "of the weight-read bound")  # fmt: skip
        stages = [(name, two_digits(n / 1e6)) for name, n in step.stages.items()]
        by_stage = markdown_table(("stage", "estimated million cycles"), stages)
        lines += [markdown_table(header, rows), "", by_stage, ""]
    kind = "operations" if target.platform == "tpu" else "kernels"
    counted = two_digits if case.within else "{:,}".format
    without = f"; plain {counted(plain.kernels)}" if drafted else ""
    lines.append(_line("memory per device", _of_memory(step.memory, target)))
    lines.append(_line(f"{kind} a step", counted(step.kernels) + without))
    if step.read:
        share = two_digits(step.read / step.weights)
        without = f"; plain {_size(plain.read)}" if drafted else ""
        lines.append(
            _line("read a step", f"{_size(step.read)}, {share} of the weights{without}")
        )
    lines.append(_line("sent a step", _sent(step.sent)))
    if case.within:
        lines.append(f"layers compiled    {case.compiled_layers} of {case.config.n_layers}, so figures "
                     f"are within {case.within:.0%} of the compiler's for all")  # fmt: skip
    lines += [f"warning: {line}" for line in defects(case, plain, step)]
    return "\n".join(lines)


def training_text(target: Target, found: Mapping[str, Any]) -> str:
    """The text that the command prints about a training step, from the object of `--json`."""
    return "\n".join(
        [
            _line("memory per device", _of_memory(found["memory_bytes"], target)),
            _line("stored", _size(found["stored_bytes"])),
            _line("sent an update", _sent(found["sent_bytes"])),
            f"layers compiled    {found['layers']}",
            *(f"warning: {line}" for line in found["warnings"]),
        ]
    )


def two_digits(x: float) -> str:
    """1.16 is "1.2", 34.7 "35", 768 "770"."""
    places = 1 - math.floor(math.log10(abs(x))) if x else 0
    return f"{round(x, places):,.{max(0, places)}f}"


def _line(name: str, figure: str) -> str:
    return f"{name:18} {figure + ' (estimated)' if figure else 'nothing'}"


def _sent(sent: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {_size(n)}" for kind, n in sent.items())


def _size(n: float) -> str:
    """Bytes; of memory the first digit after the point is known, too."""
    return f"{n / 1e9:,.1f} GB" if n >= 1e9 else f"{two_digits(n / 1e6)} MB"


def _of_memory(size: float, target: Target) -> str:
    if not target.chip.memory:
        return _size(size)
    fits = "" if size <= target.chip.memory else ": does NOT fit"
    return f"{_size(size)} of {target.chip.memory / 1e9:.0f} GB{fits}"
