"""Count what a compiled program sends between devices, by parsing its text.

XLA inserts communication when it partitions a program over a mesh, so it can only be counted in the
compiled program.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\((.*)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
# {{0,1},{2,3}}; [2,4]<=[8]; mesh['a'=2,'b'=4] {'b'}, where {'b':(2)2} is part of an axis and
# device_ids may come in between.
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]"
    r"|mesh\[([^\]]*)\](?:, device_ids=\S+)? ?\{([^}]*)\})"
)
_CALLED = re.compile(r"(?:to_apply|calls|body|condition)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Collective(NamedTuple):
    """One collective instruction.

    Attributes:
      kind: one of `KINDS`.
      shapes: shapes of the resulting arrays on a device, such as ("f32[8,16]",).
      bytes: bytes of these arrays.
      group: number of devices that exchange data with each other.
      trips: trip count of each enclosing loop, outermost first; 0 if it depends on the data.
    """

    kind: str
    shapes: tuple[str, ...]
    bytes: int
    group: int
    trips: tuple[int, ...]

    @property
    def sent(self) -> float:
        """Bytes that each device sends per execution, by the best algorithms on a ring.

        A gathered or exchanged array passes each link once, except for the device's own part. An
        all-reduce is a reduce-scatter followed by an all-gather. The result of a reduce-scatter is one
        of `group` parts.
        """
        others = (self.group - 1) / self.group
        factor = {
            "all-reduce": 2 * others,
            "reduce-scatter": self.group - 1,
            "collective-permute": 1,
        }
        return self.bytes * factor.get(self.kind, others)

    def times(self, unknown: int = 1) -> int:
        """Executions per run of the program, with `unknown` iterations for loops of unknown length."""
        return math.prod(trip or unknown for trip in self.trips)


def collectives(text: str) -> list[Collective]:
    """All collective instructions of a compiled program (`compiled.as_text()`)."""
    bodies, entry = _computations(text)
    found: list[Collective] = []

    def walk(name: str, trips: tuple[int, ...]) -> None:
        for line in bodies.get(name, ()):
            if match := _COLLECTIVE.search(line):
                result, kind, start, operands = match.groups()
                found.append(_collective(result, kind, start, operands, trips))
                continue
            inner = trips
            if " while(" in line:
                known = _TRIPS.search(line)
                inner = (*trips, int(known[1]) if known else 0)
            called = _CALLED.findall(line)
            if branches := _BRANCHES.search(line):
                called += [part.strip().lstrip("%") for part in branches[1].split(",")]
            for other in called:
                walk(other, inner)

    walk(entry, ())
    return found


def sent_by_kind(found: Sequence[Collective], unknown: int = 1) -> dict[str, float]:
    """Bytes that each device sends in one run of the program, by kind."""
    return {
        kind: sum(c.sent * c.times(unknown) for c in found if c.kind == kind)
        for kind in KINDS
        if any(c.kind == kind for c in found)
    }


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of every computation by name, and the name of the entry computation."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _collective(
    result: str, kind: str, start: str | None, operands: str, trips: tuple[int, ...]
) -> Collective:
    shapes = _ARRAY.findall(result)
    if start and kind != "all-reduce":  # operands, results, and scalars of the exchange
        shapes = [shape for shape in shapes if shape[1]]
        shapes = shapes[len(shapes) // 2 :]
    size = sum(
        math.prod(int(n) for n in dims.split(",") if n) * _bits(kind_) // 8
        for kind_, dims in shapes
    )
    members = _members(operands)
    names = tuple(f"{kind_}[{dims}]" for kind_, dims in shapes)
    return Collective(kind, names, size, members, trips)


def _members(attributes: str) -> int:
    """Number of devices in a group; 2 for a permutation, which has pairs instead of groups."""
    groups = _GROUPS.search(attributes)
    if groups is None:
        if "replica_groups=" in attributes:
            raise ValueError(f"unknown form of device groups: {attributes}")
        return 2
    listed, iota, axes, named = groups.groups()
    if listed:
        return len(listed.split(","))
    if iota:
        return int(iota)
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes))
    used = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named)
    return math.prod(int(part or sizes[axis]) for axis, part in used)


def _bits(kind: str) -> int:
    """Bits of an element type: f32 -> 32."""
    return _BITS.get(kind) or int(re.sub(r"\D", "", kind.removeprefix("f8e")) or 8)
