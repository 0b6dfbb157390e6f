"""Compiled programs with the labels, estimates and readers of their instructions."""

import dataclasses
import re
from dataclasses import dataclass
from functools import cached_property

from medusa_jax.hlo import program as hlo

_LABEL = re.compile(r'op_name="([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# Opcodes that pass values on.
PASSING = {"bitcast", "get-tuple-element", "tuple", "optimization-barrier"}


@dataclass(frozen=True)
class Instruction(hlo.Instruction):
    """One instruction, with its attributes."""

    @cached_property
    def label(self) -> str:
        """The path of named scopes and modules that it comes from; empty if unknown."""
        match = _LABEL.search(self.text)
        return match[1] if match else ""

    @cached_property
    def cycles(self) -> int:
        """The compiler's estimate for one execution; 0 where it gives none."""
        match = _CYCLES.search(self.text)
        return int(match[1]) if match else 0

    @property
    def largest(self) -> int:
        """Elements of the largest result."""
        return max((array.numbers for array in self.results), default=0)


@dataclass(frozen=True)
class Program(hlo.Program[Instruction]):
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


def read_instruction(line: str) -> Instruction:
    """Parse one line of a program."""
    return _labelled(hlo.read_instruction(line))


def read_program(text: str) -> Program:
    """Parse the text of a compiled program (`compiled.as_text()`)."""
    plain = hlo.read_program(text)
    computations = {name: [*map(_labelled, xs)] for name, xs in plain.computations.items()}
    return Program(computations, plain.entry)


def _labelled(x: hlo.Instruction) -> Instruction:
    return Instruction(*(getattr(x, field.name) for field in dataclasses.fields(x)))
