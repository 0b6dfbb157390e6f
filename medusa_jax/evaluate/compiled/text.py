"""Read the text of a compiled program (`compiled.as_text()`): instructions, and how often they run."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_LABEL = re.compile(r'op_name="([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLED = re.compile(r"(body|condition|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_BRANCH = re.compile(r"(?:true|false)_computation=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "c64": 8, "c128": 16, "token": 0}
# Opcodes that pass values on.
PASSING = {"bitcast", "get-tuple-element", "tuple", "optimization-barrier"}


class Array(NamedTuple):
    """One array of a result: element type, sizes, and whether it is outside the main memory.

    Attributes:
      space: XLA's memory space: 0 is the main memory, 1 a TPU's vector memory, 5 the host's.
    """

    kind: str
    sizes: tuple[int, ...]
    space: int

    @property
    def numbers(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        """Bytes without the padding of tiles."""
        if self.kind in _BYTES:
            return self.numbers * _BYTES[self.kind]
        return self.numbers * int(re.sub(r"^f8.*", "8", self.kind).lstrip("sufbe")) // 8


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      label: the path of named scopes and modules that it comes from; empty if unknown.
      cycles: the compiler's estimate for one execution; 0 where it gives none.
      called: (role, computation); roles are body, condition, to_apply, calls and branch.
      rest: attributes as written.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    label: str
    cycles: int
    called: tuple[tuple[str, str], ...]
    rest: str

    def calls(self, role: str) -> list[str]:
        """Computations that it calls in this role."""
        return [name for kind, name in self.called if kind == role]


@dataclass(frozen=True)
class Computation:
    """The instructions of a computation in order, by name."""

    instructions: dict[str, Instruction] = field(default_factory=dict)

    @cached_property
    def readers(self) -> dict[str, list[Instruction]]:
        """The instructions that read each result."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self:
            for operand in instruction.operands:
                found.setdefault(operand, []).append(instruction)
        return found

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())


@dataclass(frozen=True)
class Program:
    """All computations by name, and the entry's name."""

    computations: dict[str, Computation]
    entry: str

    def step_loop(self) -> Instruction | None:
        """The loop with the largest body: the decode loop. None without a loop.

        XLA for CUDA moves it out of the entry, into the computation of a graph.
        """
        loops = [x for c in self.computations.values() for x in c if x.opcode == "while"]
        return max(loops, key=lambda x: self._size(x.calls("body")[0]), default=None)

    def _size(self, name: str) -> int:
        return len(self.computations[name].instructions)

    def trips(self, loop: Instruction) -> int:
        """Iterations of a loop that counts from 0 to a constant; 0 if the data decide.

        XLA for TPUs does not write known counts, so they are read from the condition: a single
        comparison with a constant. `fori_loop` with fixed bounds, which the code gives, is of this form.
        """
        if known := _TRIPS.search(loop.rest):
            return int(known[1])
        condition = self.computations[loop.calls("condition")[0]]
        lines = [x for x in condition if x.opcode not in ("parameter", *PASSING)]
        if inner := [x for x in lines if x.opcode == "fusion"]:
            lines += self.computations[inner[0].calls("calls")[0]]
        compared = [x for x in lines if x.opcode == "compare"]
        bounds = [
            int(found[1])
            for x in lines
            if x.opcode == "constant"
            and (
                found := re.match(r"\{?\s*(\d+)\s*\}?$", x.rest.split("),")[0].strip("()"))
            )
        ]
        if len(compared) != 1 or len(bounds) != 1 or "direction=LT" not in compared[0].rest:
            return 0
        return bounds[0]


def read_program(text: str) -> Program:
    """Parse the text of a compiled program."""
    found: dict[str, Computation] = {}
    entry = name = ""
    for line in text.splitlines():
        if line[:1] not in (" ", "}", "") and (head := _HEAD.match(line)):
            name = head[2]
            entry = name if head[1] else entry
            found[name] = Computation()
        elif name and " = " in line:
            instruction = read_instruction(line)
            found[name].instructions[instruction.name] = instruction
    return Program(found, entry)


def read_instruction(line: str) -> Instruction:
    """`  ROOT %name = type opcode(operands), attributes`."""
    left, _, right = line.strip().partition(" = ")
    kind, right = _balanced(right) if right.startswith("(") else _word(right)
    opcode, _, right = right.partition("(")
    operands, rest = _balanced("(" + right)
    label, cycles = _LABEL.search(rest), _CYCLES.search(rest)
    called = _CALLED.findall(rest)
    if branches := _BRANCHES.search(rest):
        called += [("branch", x.strip().lstrip("%")) for x in branches[1].split(",")]
    called += [("branch", x) for x in _BRANCH.findall(rest)]
    return Instruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        opcode=opcode.strip(),
        results=tuple(_array(*found) for found in _ARRAY.findall(kind)),
        operands=tuple(_NAME.findall(operands)),
        label=label[1] if label else "",
        cycles=int(cycles[1]) if cycles else 0,
        called=tuple(called),
        rest=operands + rest,
    )


def _array(kind: str, sizes: str, layout: str) -> Array:
    space = re.search(r"S\((\d+)\)", layout)
    return Array(
        kind, tuple(int(n) for n in sizes.split(",") if n), int(space[1]) if space else 0
    )


def _word(text: str) -> tuple[str, str]:
    first, _, rest = text.partition(" ")
    return first, rest


def _balanced(text: str) -> tuple[str, str]:
    """Split after the bracket that closes the first one."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return text[: found.end()], text[found.end() :]
    return text, ""
