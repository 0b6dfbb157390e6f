"""Count the bytes that a compiled program sends between devices.

XLA inserts communication when it partitions a program over a mesh, so only the compiled program shows it.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from medusa_jax.hlo.program import Array, Instruction, read_program

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

# {{0,1},{2,3}}; [2,4]<=[8]; mesh['a'=2,'b'=4] {'b'}, where {'b':(2)2} is part of an axis and
# device_ids may come in between.
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]"
    r"|mesh\[([^\]]*)\](?:, device_ids=\S+)? ?\{([^}]*)\})"
)


class Collective(NamedTuple):
    """One collective instruction.

    Attributes:
      kind: one of `KINDS`.
      arrays: the resulting arrays on a device.
      group: number of devices that exchange data with each other.
      trips: trip count of each enclosing loop, outermost first; 0 if it depends on the data.
    """

    kind: str
    arrays: tuple[Array, ...]
    group: int
    trips: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the resulting arrays on a device."""
        return sum(array.bytes for array in self.arrays)

    @property
    def sent(self) -> float:
        """Bytes that each device sends per execution, by the best algorithms on a ring.

        A gathered or exchanged array passes each link once, except for the device's own part. An
        all-reduce is a reduce-scatter followed by an all-gather. The result of a reduce-scatter is one
        of `group` parts.
        """
        share = (self.group - 1) / self.group
        factor = {
            "all-reduce": 2 * share,
            "reduce-scatter": self.group - 1,
            "collective-permute": 1,
        }
        return self.bytes * factor.get(self.kind, share)

    def times(self, unknown: int = 1) -> int:
        """Executions per run of the program, with `unknown` iterations for loops of unknown length."""
        return math.prod(trip or unknown for trip in self.trips)


def collectives(text: str) -> list[Collective]:
    """All collective instructions of a compiled program (`compiled.as_text()`)."""
    program = read_program(text)
    items: list[Collective] = []

    def walk(name: str, trips: tuple[int, ...]) -> None:
        for x in program.computations.get(name, ()):
            if (kind := x.opcode.removesuffix("-start")) in KINDS:
                items.append(Collective(kind, _arrays(x, kind), _members(x.text), trips))
                continue
            inner = (*trips, program.trips(x)) if x.opcode == "while" else trips
            for _, callee in x.called:
                walk(callee, inner)

    walk(program.entry, ())
    return items


def sent_by_kind(items: Sequence[Collective], unknown: int = 1) -> dict[str, float]:
    """Bytes that each device sends in one run of the program, by kind."""
    return {
        kind: sum(c.sent * c.times(unknown) for c in items if c.kind == kind)
        for kind in KINDS
        if any(c.kind == kind for c in items)
    }


def _arrays(x: Instruction, kind: str) -> tuple[Array, ...]:
    """Resulting arrays; an asynchronous start also has its operands and scalars of the exchange."""
    if x.opcode == kind or kind == "all-reduce":
        return x.results
    arrays = [array for array in x.results if array.sizes]
    return tuple(arrays[len(arrays) // 2 :])


def _members(attributes: str) -> int:
    """Number of devices in a group; 2 for a permutation, which has pairs instead of groups."""
    groups = _GROUPS.search(attributes)
    if groups is None:
        if "replica_groups=" in attributes:
            raise ValueError(f"unknown form of device groups: {attributes}")
        return 2
    first_group, iota, axes, names = groups.groups()
    if first_group:
        return len(first_group.split(","))
    if iota:
        return int(iota)
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes))
    parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", names)
    return math.prod(int(part or sizes[axis]) for axis, part in parts)
