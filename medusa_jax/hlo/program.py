"""Parse the text of a compiled program (`compiled.as_text()`)."""

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(body|condition|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_BRANCH = re.compile(r"(?:true|false)_computation=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LABEL = re.compile(r'op_name="([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_BITS = {"pred": 8, "token": 0}


class Array(NamedTuple):
    """One array of a result.

    Attributes:
      kind: element type.
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
        bits = re.match(r"[a-z]+(\d+)", self.kind)
        return self.numbers * (int(bits[1]) if bits else _BITS.get(self.kind, 0)) // 8


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      called: (role, computation); roles are body, condition, to_apply, calls and branch.
      text: operands and attributes as written.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    called: tuple[tuple[str, str], ...]
    text: str

    @property
    def bytes(self) -> int:
        """Bytes of all results."""
        return sum(array.bytes for array in self.results)

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

    def calls(self, role: str) -> list[str]:
        """Computations that it calls in this role."""
        return [name for kind, name in self.called if kind == role]


@dataclass(frozen=True)
class Program:
    """The instructions of each computation in order, and the entry's name."""

    computations: dict[str, list[Instruction]]
    entry: str

    def fused(self, x: Instruction) -> list[Instruction]:
        """The instructions of a fusion, those of fusions within it included; else none."""
        names = x.calls("calls") if x.opcode == "fusion" else []
        instructions = [y for name in names for y in self.computations[name]]
        return [z for y in instructions for z in (y, *self.fused(y))]

    def trips(self, loop: Instruction) -> int:
        """Iterations of a loop that counts from 0 to a constant; 0 if the data decide.

        XLA for TPUs does not write known counts, so they are read from the condition: a single
        comparison with a constant. `fori_loop` with fixed bounds, which the code gives, is of this form.
        """
        if count := _TRIPS.search(loop.text):
            return int(count[1])
        condition = self.computations.get(loop.calls("condition")[0], [])
        lines = [y for x in condition for y in (x, *self.fused(x))]
        compared = [x for x in lines if x.opcode == "compare"]
        bounds = [
            int(bound[1])
            for x in lines
            if x.opcode == "constant"
            and (bound := re.match(r"\(\{?\s*(\d+)\s*\}?\)", x.text))
        ]
        if len(compared) != 1 or len(bounds) != 1 or "direction=LT" not in compared[0].text:
            return 0
        return bounds[0]


def read_program(text: str) -> Program:
    """Parse the text of a compiled program."""
    computations: dict[str, list[Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        if line[:1] not in (" ", "}", "") and (head := _HEAD.match(line)):
            name = head[2]
            entry = name if head[1] else entry
            computations[name] = []
        elif name and " = " in line:
            computations[name].append(read_instruction(line))
    return Program(computations, entry)


def read_instruction(line: str) -> Instruction:
    """Parse `  ROOT %name = type opcode(operands), attributes`."""
    left, _, right = line.strip().partition(" = ")
    kind, right = _balanced(right) if right.startswith("(") else _word(right)
    opcode, _, right = right.partition("(")
    operands, attributes = _balanced("(" + right)
    called = _CALLED.findall(attributes)
    if branches := _BRANCHES.search(attributes):
        called += [("branch", x.strip().lstrip("%")) for x in branches[1].split(",")]
    called += [("branch", x) for x in _BRANCH.findall(attributes)]
    return Instruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        opcode=opcode.strip(),
        results=tuple(_array(*array) for array in _ARRAY.findall(kind)),
        operands=tuple(_NAME.findall(operands)),
        called=tuple(called),
        text=operands + attributes,
    )


def _array(kind: str, sizes: str, layout: str) -> Array:
    space = re.search(r"S\((\d+)\)", layout)
    numbers = tuple(int(n) for n in sizes.split(",") if n)
    return Array(kind, numbers, int(space[1]) if space else 0)


def _word(text: str) -> tuple[str, str]:
    word, _, tail = text.partition(" ")
    return word, tail


def _balanced(text: str) -> tuple[str, str]:
    """Split after the bracket that closes the first one."""
    depth = 0
    for bracket in re.finditer(r"[()]", text):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return text[: bracket.end()], text[bracket.end() :]
    return text, ""
