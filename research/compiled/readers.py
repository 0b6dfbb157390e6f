"""Compiled programs whose instructions know their readers."""

from dataclasses import dataclass
from functools import cached_property

from medusa_jax.hlo import program as hlo
from medusa_jax.hlo.program import Instruction

# Opcodes that pass values on.
PASSING = {"bitcast", "get-tuple-element", "tuple", "optimization-barrier"}


def largest(x: Instruction) -> int:
    """Elements of the largest result."""
    return max((array.numbers for array in x.results), default=0)


@dataclass(frozen=True)
class Program(hlo.Program):
    """A program whose instructions know their readers."""

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """All instructions by name; XLA gives none to two of a program."""
        return {
            x.name: x for computation in self.computations.values() for x in computation
        }

    @cached_property
    def readers(self) -> dict[str, list[Instruction]]:
        """The instructions that read each result."""
        readers: dict[str, list[Instruction]] = {}
        for x in self.instructions.values():
            for operand in x.operands:
                readers.setdefault(operand, []).append(x)
        return readers

    def step_loop(self) -> Instruction | None:
        """The loop with the largest body: the decode loop. None without a loop.

        XLA for CUDA moves it out of the entry, into the computation of a graph.
        """
        loops = [x for x in self.instructions.values() if x.opcode == "while"]
        size = {x.name: len(self.computations[x.calls("body")[0]]) for x in loops}
        return max(loops, key=lambda x: size[x.name], default=None)


def read_program(text: str) -> Program:
    """Parse the text of a compiled program (`compiled.as_text()`)."""
    plain = hlo.read_program(text)
    return Program(plain.computations, plain.entry)
