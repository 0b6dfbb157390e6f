"""Cost of a decode step by stage: the compiler's cycles, kernels, and bytes that the kernels read.

The compiler's estimates leave out loads ahead of their use (`copy-start`, `slice-start`): these bytes are
charged to the operation that reads them, at the chip's peak bandwidth. Our own kernels are opaque to
the compiler: the parts of the cost that they state are added up, at peak rates. Costs of the compiled
layers are scaled to all layers of the model.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jax.stages import Compiled

from medusa_jax.hlo.program import Instruction
from research.compiled.readers import PASSING, Program, read_program

STAGES = ("draft", "backbone", "attention", "lm_head", "accept", "commit", "sampling")
# A drafter has layers, attention and LM heads, too: they are its stage's.
OUTER = ("draft", "commit")
# Labels of what exists once in every layer: `llama._run_layer`, and `Kernels.commit`.
_LAYER = re.compile(r"jit\(_run_layer\)|/cache/")
# Filters of sampling that run only where a row asks for them, as their `lax.cond` are labelled.
FILTERS = ("top_k", "top_p", "min_p")
_STATED = re.compile(
    r'"cost_estimate":\{"flops":"(\d+)","transcendentals":"(\d+)","bytes_accessed":"(\d+)"'
)
# Transcendental functions of a TPU's vector unit in a cycle: one in each lane.
LANES = 8 * 128
_SLICES = ("dynamic-slice", "slice", "gather")
# Opcodes that launch no kernel.
_FREE = PASSING | {
    "parameter",
    "constant",
    "while",
    "conditional",
    "call",
    "after-all",
    "iota",
}
_AHEAD = ("copy-start", "slice-start", "dynamic-slice-start")


@dataclass(frozen=True)
class Cost:
    """Cycles of one instruction in one step of the compiled model.

    Attributes:
      label: where it comes from, or what reads it if the compiler added it.
      times: executions in a step.
      launched: of a loop, kernels that its rounds launch in a step.
    """

    instruction: Instruction
    label: str
    cycles: float
    times: int
    launched: int = 0


def step_costs(
    program: Program,
    bytes_per_cycle: float,
    flops_per_cycle: float = 0.0,
    filters: tuple[str, ...] = (),
) -> list[Cost]:
    """Cost of each instruction in the decode loop's body, loops and branches inside it included.

    Args:
      bytes_per_cycle, flops_per_cycle: the chip's peaks; 0 if nothing has an estimate.
      filters: which of `FILTERS` the rows use; a `lax.cond` of another one takes its cheapest branch.
    """
    loop = program.step_loop()
    if loop is None:
        return []

    def walk(name: str, label: str, times: int) -> Iterator[Cost]:
        for x in program.computations[name]:
            scope = x.label or label or label_of(program, x)
            if x.opcode == "while":
                inner = times * max(1, program.trips(x))
                # Rounds of a known number are run without the condition.
                counted = "known_trip_count" in x.text
                parts = x.calls("body") + ([] if counted else x.calls("condition"))
                costs = [cost for part in parts for cost in walk(part, scope, inner)]
                yield Cost(x, scope, 0, times, launched_by(costs))
                yield from costs
            elif x.opcode == "conditional":
                branches = [list(walk(b, scope, times)) for b in x.calls("branch")]
                unused = any(f in scope.split("/") for f in FILTERS if f not in filters)
                yield from (min if unused else max)(branches, key=price)
            elif x.opcode == "call":
                yield from walk(x.calls("to_apply")[0], scope, times)
            elif x.opcode in _AHEAD:
                prefetch = moved(x) / bytes_per_cycle if bytes_per_cycle else 0
                yield Cost(x, label_of(program, x), prefetch, times)
            else:
                yield Cost(x, scope, x.cycles or stated(x), times)

    def stated(x: Instruction) -> float:
        stated_cost = _STATED.search(x.text)
        if stated_cost is None or not bytes_per_cycle or not flops_per_cycle:
            return 0
        flops, transcendentals, accessed = map(int, stated_cost.groups())
        return (
            flops / flops_per_cycle + transcendentals / LANES + accessed / bytes_per_cycle
        )

    return list(walk(loop.calls("body")[0], "", 1))


def price(costs: list[Cost]) -> tuple[float, int]:
    """Cycles of all executions in a step, and kernels: a GPU's programs have no cycles."""
    return sum(cost.cycles * cost.times for cost in costs), launched_by(costs)


def moved(x: Instruction) -> int:
    """Bytes that a `copy-start` or a `slice-start` moves."""
    arrays = [a for a in x.results if a.kind not in ("u32", "s32") or len(a.sizes) > 0]
    return min((a.bytes for a in arrays), default=0)


def label_of(program: Program, x: Instruction) -> str:
    """The label of an instruction; of one without, that of its reader, else of the maker of its operand."""
    visited, front = {x.name}, [x]
    while front and not x.label:  # breadth first, forwards
        readers = {r.name: r for y in front for r in program.readers.get(y.name, ())}
        front = [r for name, r in readers.items() if name not in visited]
        visited |= readers.keys()
        for reader in front:
            if reader.label and reader.opcode not in PASSING:
                return reader.label
    while not x.label and x.operands and x.operands[0] in program.instructions:
        x = program.instructions[x.operands[0]]
    return x.label


def stage_of(label: str) -> str:
    """The stage of a step that a label belongs to; "other" if none."""
    stages = [part for part in label.split("/") if part in STAGES]
    if not stages:
        return "other"
    if stages[0] in OUTER and stages[-1] != "sampling":
        return stages[0]
    return stages[-1]


def of_all_layers(costs: list[Cost], compiled: int, n_layers: int) -> dict[str, float]:
    """Cycles by stage, those of `compiled` layers extrapolated to `n_layers`; without empty stages."""
    cycles_of: dict[str, float] = {}
    for cost in costs:
        stage = stage_of(cost.label)
        cycles = cost.cycles * repeats(cost, compiled, n_layers)
        cycles_of[stage] = cycles_of.get(stage, 0) + cycles
    return {s: cycles_of[s] for s in (*STAGES, "other") if cycles_of.get(s, 0) > 0}


def launches(x: Instruction) -> bool:
    """Whether a GPU launches a kernel for it."""
    return x.opcode not in _FREE and not x.opcode.endswith("-done")


def launched_by(costs: list[Cost]) -> int:
    """Kernels of these instructions in a step of the compiled program."""
    return sum(cost.times for cost in costs if launches(cost.instruction))


def repeats(cost: Cost, compiled: int, n_layers: int) -> float:
    """Executions in a step of the whole model, `compiled` layers of which are in the program."""
    return cost.times * (n_layers / compiled if _LAYER.search(cost.label) else 1)


def kernels(costs: list[Cost], compiled: int, n_layers: int) -> float:
    """Kernels that a GPU launches in a step, with those of `compiled` layers extrapolated."""
    return sum(repeats(c, compiled, n_layers) for c in costs if launches(c.instruction))


def kernels_of(compiled: Compiled, n_layers: int) -> tuple[int, int]:
    """Kernels of a step of a compiled loop of decode steps, and the bytes that they read."""
    program = read_program(compiled.as_text() or "")
    costs = step_costs(program, 0.0)
    n_bytes = bytes_read(program, costs, n_layers, n_layers)
    return round(kernels(costs, n_layers, n_layers)), round(n_bytes)


def bytes_read(program: Program, costs: list[Cost], compiled: int, n_layers: int) -> float:
    """Operands of all kernels of a step, those of `compiled` layers extrapolated to `n_layers`.

    Of an array that a kernel only slices, only the slices count, and an array that it updates in place does
    not count. Results of earlier kernels are read too, and may come from a cache of the chip.
    """
    return sum(
        _operands(program, cost.instruction) * repeats(cost, compiled, n_layers)
        for cost in costs
        if launches(cost.instruction)
    )


def _operands(program: Program, x: Instruction) -> int:
    if x.opcode in _SLICES:
        return x.bytes
    if x.opcode == "dynamic-update-slice":
        return program.instructions[x.operands[1]].bytes
    if x.opcode == "fusion":
        computation = program.computations[x.calls("calls")[0]]
        return sum(_used(program, y) for y in computation if y.opcode == "parameter")
    instructions = program.instructions
    return sum(instructions[name].bytes for name in x.operands if name in instructions)


def _used(program: Program, x: Instruction) -> int:
    """Bytes that a fusion reads of one of its parameters, or of a bitcast of it."""
    total = 0
    for reader in program.readers.get(x.name, ()):
        if reader.opcode == "bitcast":
            total += _used(program, reader)
        elif reader.opcode in _SLICES:
            total += reader.bytes
        elif reader.opcode != "dynamic-update-slice" or reader.operands[0] != x.name:
            total += x.bytes
    return min(total, x.bytes)
