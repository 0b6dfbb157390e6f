"""A decode step compiled for an accelerator, next to the plain loop under the same options."""

from collections.abc import Mapping
from typing import Any

from medusa_jax.evaluate.compiled.programs import Case, Step, compile_step
from medusa_jax.evaluate.compiled.targets import Target
from medusa_jax.evaluate.compiled.warnings import warnings_of
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.heads.drafter import Drafter, NoDrafter
from medusa_jax.tree import Tree


def measure(case: Case, drafter: Drafter, tree: Tree) -> tuple[Step, Step]:
    """The plain step and the drafter's; the same one for the empty tree."""
    plain = compile_step(case, NoDrafter(drafter.heads, drafter.llama), Tree.none())
    return plain, compile_step(case, drafter, tree) if tree.depth else plain


def as_json(case: Case, plain: Step, step: Step) -> dict[str, Any]:
    """The object that `--json` prints. Cycles, ratios and shares are None on a GPU."""
    target = case.target
    ratio = None
    if plain.cycles is not None and step.cycles is not None:
        ratio = step.cycles / plain.cycles
    return {
        "target": target.name,
        "plain": {"cycles": plain.cycles, "share_of_bound": plain.share_of_bound(target)},
        "step": {
            "cycles": step.cycles,
            "ratio": ratio,
            "share_of_bound": step.share_of_bound(target),
            "stages": step.stages,
        },
        "kernels": step.kernels,
        "read_bytes": step.read or None,
        "memory_bytes": step.memory,
        "warnings": defects(case, plain, step),
    }


def defects(case: Case, *steps: Step) -> list[str]:
    """The named warnings of these steps, each line once."""
    found = [
        line
        for step in steps
        for line in warnings_of(
            step.program,
            step.costs,
            case.config.vocab_size,
            step.cache_numbers,
            on_tpu=case.target.bytes_per_cycle > 0,
        )
    ]
    return list(dict.fromkeys(found))


def as_text(case: Case, plain: Step, step: Step) -> str:
    """What the command prints without `--json`."""
    target, lines = case.target, []
    if plain.cycles is not None and step.cycles is not None:
        rows = [
            _row("plain", plain, plain, target),
            _row("with drafts", step, plain, target),
        ]
        header = ("", "million cycles", "of plain", "ms", "of the weight-read bound")
        lines += [markdown_table(header, rows), "", _stages(step.stages), ""]
    kind = "kernels" if target.chip.clock == 0 else "operations"
    lines.append(f"memory per device  {_gigabytes(step.memory, target)}")
    lines.append(f"{kind + ' a step':18} {step.kernels:,}")
    if step.read:
        lines.append(
            f"read a step        {step.read / 1e9:.2f} GB, {step.read / step.weights:.2f} of "
            "the weights"
        )
    sent = ", ".join(f"{k} {v / 1e6:,.1f} MB" for k, v in step.sent.items())
    lines.append(f"sent a step        {sent or 'nothing'}")
    lines += [f"warning: {line}" for line in defects(case, plain, step)]
    return "\n".join(lines)


def training_text(target: Target, found: Mapping[str, Any]) -> str:
    """What the command prints of a training step."""
    sent = ", ".join(f"{k} {v / 1e9:,.2f} GB" for k, v in found["sent_bytes"].items())
    return "\n".join(
        [
            f"memory per device  {_gigabytes(found['memory_bytes'], target)}",
            f"counted by hand    {found['counted_bytes'] / 1e9:.2f} GB",
            f"sent an update     {sent or 'nothing'}",
            f"layers compiled    {found['layers']}",
            *(f"warning: {line}" for line in found["warnings"]),
        ]
    )


def training_json(target: Target, found: Mapping[str, Any]) -> dict[str, Any]:
    """`as_json` of a training step, of which the text has no cycles that could be added up."""
    nothing = {"cycles": None, "share_of_bound": None}
    return {
        "target": target.name,
        "plain": nothing,
        "step": nothing | {"ratio": None, "stages": {}},
        "kernels": None,
        "memory_bytes": found["memory_bytes"],
        "counted_bytes": found["counted_bytes"],
        "warnings": found["warnings"],
    }


def _row(name: str, step: Step, plain: Step, target: Target) -> tuple[str, ...]:
    assert step.cycles is not None and plain.cycles is not None
    return (
        name,
        f"{step.cycles / 1e6:.1f}",
        f"{step.cycles / plain.cycles:.2f}",
        f"{1e3 * step.cycles / target.chip.clock:.1f}",
        f"{step.share_of_bound(target):.2f}",
    )


def _stages(stages: Mapping[str, float]) -> str:
    rows = [(name, f"{cycles / 1e6:.2f}") for name, cycles in stages.items()]
    return markdown_table(("stage", "million cycles"), rows)


def _gigabytes(size: float, target: Target) -> str:
    fits = "" if size <= target.chip.memory else ": does NOT fit"
    return f"{size / 1e9:.2f} of {target.chip.memory / 1e9:.0f} GB{fits}"
