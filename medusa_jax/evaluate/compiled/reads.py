"""Bytes that the kernels of a step read, counted from the optimised program of a GPU."""

from jax.stages import Compiled

from medusa_jax.evaluate.compiled.cycles import Cost, kernels, launches, repeats, step_costs
from medusa_jax.evaluate.compiled.text import (
    Computation,
    Instruction,
    Program,
    read_program,
)

_SLICES = ("dynamic-slice", "slice", "gather")


def kernels_of(
    compiled: Compiled, n_layers: int, layers: int = 0, filters: tuple[str, ...] = ()
) -> tuple[int, int]:
    """Kernels of a step of a compiled loop of decode steps, and the bytes that they read.

    Args:
      n_layers: layers of the model.
      layers: those that the program has; 0: all.
      filters: as for `step_costs`.
    """
    program = read_program(compiled.as_text() or "")
    costs = step_costs(program, 0.0, filters=filters)
    sizes = (layers or n_layers, n_layers)
    return round(kernels(costs, *sizes)), round(bytes_read(program, costs, *sizes))


def bytes_read(program: Program, costs: list[Cost], compiled: int, n_layers: int) -> float:
    """Operands of all kernels of a step, those of `compiled` layers extrapolated to `n_layers`.

    Of an array that a kernel only slices, the slices count; what it updates in place counts nothing.
    Results of earlier kernels are read, too, and may come from a cache of the chip.
    """
    made = {x.name: x for c in program.computations.values() for x in c}
    return sum(
        _operands(program, made, cost.instruction) * repeats(cost, compiled, n_layers)
        for cost in costs
        if launches(cost.instruction)
    )


def _operands(program: Program, made: dict[str, Instruction], x: Instruction) -> int:
    if x.opcode in _SLICES:
        return _size(x)
    if x.opcode == "dynamic-update-slice":
        return _size(made[x.operands[1]])
    if x.opcode == "fusion":
        inside = program.computations[x.calls("calls")[0]]
        return sum(_used(inside, y) for y in inside if y.opcode == "parameter")
    return sum(_size(made[name]) for name in x.operands if name in made)


def _used(inside: Computation, x: Instruction) -> int:
    """Bytes that a fusion reads of one of its parameters, or of a bitcast of it."""
    parts = []
    for reader in inside.readers.get(x.name, ()):
        if reader.opcode == "bitcast":
            parts.append(_used(inside, reader))
        elif reader.opcode in _SLICES:
            parts.append(_size(reader))
        elif reader.opcode == "dynamic-update-slice" and reader.operands[0] == x.name:
            parts.append(0)
        else:
            parts.append(_size(x))
    return min(sum(parts), _size(x))


def _size(x: Instruction) -> int:
    return sum(a.bytes for a in x.results)
