"""The rules of GBNF as a Lark grammar of llguidance with the same language.

In GBNF every split of a text into rules counts, but llguidance's terminals take their longest match. So a
part of a grammar is a terminal only where that is the only split: where no byte that continues it may also
come after it. Other parts are divided, down to single characters. A grammar without recursion is one
terminal.

Runs in the child process of `grammars.py`, which does not import the package.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_jax.constraints.gbnf import Node

# Most characters of a terminal among rules, and most steps of the search for other splits.
MOST_CHARACTERS, MOST_WORK = 2000, 300_000
ALL_BYTES = (1 << 256) - 1
# Whether a part may be empty; the characters that it may begin and end with.
Ends = tuple[bool, frozenset[int], frozenset[int]]


def lark_of(rules: dict[str, Node]) -> str:
    """The Lark grammar of rules by name, of which "root" is the first."""
    return _Translation(rules).lark()


class _Translation:
    """A grammar on its way to terminals, and rules among them."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        # Rules without recursion: how many characters they have, and their parts without rules.
        self._flat: dict[str, tuple[int, Node]] = {}
        left = dict(rules)
        while ready := [name for name, rule in left.items() if self._is_flat(rule)]:
            self._flat |= {name: self._flattened(left.pop(name)) for name in ready}
        self._divided = set[str]()  # regular expressions of what can be no terminal

    def lark(self) -> str:
        """The grammar in Lark's notation."""
        size, whole = self._flat.get("root", (MOST_WORK, None))
        if whole and size < MOST_WORK:
            return f"start: T0\nT0: /{_regex(whole)}/\n"
        while True:
            trees: dict[str, Node] = {}
            wanted = ["root"]
            for name in wanted:
                if name not in trees:
                    trees[name] = self._divide(self._rules[name])
                    wanted += trees[name].names
            more = _Splits(trees).other()
            if not more:
                break
            self._divided |= more
        rules, terminals = {name: f"r{i}" for i, name in enumerate(trees)}, dict[str, str]()

        def shown(node: Node) -> str:
            if node.kind == "terminal":
                return terminals.setdefault(node.value, f"T{len(terminals)}")
            if node.kind == "rule":
                return rules[node.value]
            sign = " | " if node.kind == "alt" else " "
            inner = f"({sign.join(map(shown, node.parts))})" if node.parts else '""'
            return inner + _times(node)

        lines = [
            "start: r0",
            *(f"{rules[name]}: {shown(tree)}" for name, tree in trees.items()),
        ]
        lines += [f"{name}: /{regex}/" for regex, name in terminals.items()]
        return "\n".join([*lines, ""])

    def _is_flat(self, node: Node) -> bool:
        return all(name in self._flat for name in node.names)

    def _flattened(self, node: Node) -> tuple[int, Node]:
        """How many characters a part without recursion has, and the part without rules."""
        if node.kind == "rule":
            return self._flat[node.value]
        found = [self._flattened(part) for part in node.parts]
        size = sum(n for n, _ in found) + (node.kind == "set")
        return size, node._replace(parts=tuple(part for _, part in found))

    def _terminal(self, node: Node) -> Node | None:
        """A part as a terminal; None if it can be none."""
        if not self._is_flat(node):
            return None
        size, flat = self._flattened(node)
        if size > MOST_CHARACTERS or _may_be_empty(flat):
            return None
        regex = _regex(flat)
        return (
            None
            if regex in self._divided
            else node._replace(kind="terminal", parts=(flat,), value=regex)
        )

    def _divide(self, node: Node) -> Node:
        """A part as terminals and what is around them."""
        if whole := self._terminal(node):
            return whole
        if node.kind == "repeat" and node.value[0] == 0 != node.value[1]:
            some = self._terminal(node._replace(value=(1, node.value[1])))
            if some:
                return node._replace(parts=(some,), value=(0, 1))
        made: list[Node] = []
        for flat, run in groupby(node.parts, self._is_flat):
            parts = tuple(run)
            merged = flat and len(parts) > 1 and self._terminal(node._replace(parts=parts))
            made += [merged] if merged else map(self._divide, parts)
        return node._replace(parts=tuple(made))


def _times(node: Node) -> str:
    """How often a part is repeated, as in a regular expression."""
    if node.kind != "repeat":
        return ""
    least, most = node.value
    return f"{{{least},{'' if most is None else most}}}"


def _regex(node: Node) -> str:
    """The regular expression of a part without rules, as it is within slashes."""
    if node.kind == "set":
        ends = [
            "-".join(f"\\x{{{code:x}}}" for code in dict.fromkeys(r)) for r in node.value
        ]
        return f"[{''.join(ends)}]"
    sign = "|" if node.kind == "alt" else ""
    return f"(?:{sign.join(map(_regex, node.parts))}){_times(node)}"


def _may_be_empty(node: Node) -> bool:
    """Whether a part without rules matches the empty text."""
    if node.kind == "set" or (node.kind == "repeat" and node.value[0] == 0):
        return node.kind != "set"
    return (any if node.kind == "alt" else all)(map(_may_be_empty, node.parts))


class _Splits:
    """The characters of a grammar, numbered, and which may follow which.

    Args:
      trees: rules by name, whose characters are all within terminals.
    """

    def __init__(self, trees: dict[str, Node]) -> None:
        self._first_bytes: list[int] = []
        self._owners: list[Node] = []  # their terminals
        # What may follow a character: in its terminal, and after that.
        self._within, self._after = list[set[int]](), list[set[int]]()
        nothing = frozenset[int]()
        # Of rules and terminals: whether they may be empty, what they may begin and end with.
        self._ends: dict[Any, Ends] = dict.fromkeys(trees, (False, nothing, nothing))
        before: object = None
        while before != (before := (dict(self._ends), sum(map(len, self._after)))):
            for name, tree in trees.items():
                self._ends[name] = self._read(tree)

    def _read(self, node: Node, inside: Node | None = None) -> Ends:
        """What a part may begin and end with; its characters in the terminal `inside`."""
        nothing = frozenset[int]()
        if node.kind == "rule":
            return self._ends[node.value]
        if node.kind == "terminal":
            if id(node) not in self._ends:
                self._ends[id(node)] = self._read(node.parts[0], node)
            return self._ends[id(node)]
        if node.kind == "set":
            here = frozenset([len(self._owners)])
            self._owners.append(inside or node)
            self._first_bytes.append(_first_bytes(node))
            self._within.append(set())
            self._after.append(set())
            return False, here, here
        found = [self._read(part, inside) for part in node.parts]
        if node.kind == "alt":
            empty, firsts, lasts = zip(*found)
            return any(empty), nothing.union(*firsts), nothing.union(*lasts)
        so_far: Ends = True, nothing, nothing
        again = node.kind == "repeat" and node.value[1] != 1
        for optional, first, last in found * (1 + again):
            for position in so_far[2]:
                (self._within if inside else self._after)[position] |= first
            begin = so_far[1] | first if so_far[0] else so_far[1]
            so_far = so_far[0] and optional, begin, so_far[2] | last if optional else last
        optional = node.kind == "repeat" and node.value[0] == 0
        return so_far[0] or optional, so_far[1], so_far[2]

    def other(self) -> set[str]:
        """Terminals whose longest match may not be the only split.

        Follows all texts at once: a state is the set of characters of the grammar that the last one of a
        text may be. Of the next one, its first byte counts.
        """
        divided, work = set[str](), 0
        seen, states = set[frozenset[int]](), [self._ends["root"][1]]
        while states:
            state = states.pop()
            inside = set[int]().union(*(self._within[position] for position in state))
            beyond = set[int]().union(*(self._after[position] for position in state))
            shared = 0
            for position in beyond:
                shared |= self._first_bytes[position]
            both = [p for p in inside if self._first_bytes[p] & shared]
            divided.update(self._owners[position].value for position in both)
            groups = {ALL_BYTES: frozenset[int]()}  # the next states by their bytes
            for position in () if both else inside | beyond:
                mine, finer = self._first_bytes[position], dict[int, frozenset[int]]()
                for some, group in groups.items():
                    finer |= {some & mine: group | {position}, some & ~mine: group}
                finer.pop(0, None)
                groups = finer
                work += len(groups)
            if work > MOST_WORK:
                return {one.value for one in self._owners if one.parts[0].kind != "set"}
            new = {group for group in groups.values() if group} - seen
            seen |= new
            states += new
            work += 1 + len(inside) + len(beyond)
        return divided


def _first_bytes(chars: Node) -> int:
    """Bits of the bytes that characters may begin with."""
    bits = 0
    for low, high in chars.value:
        first, last = (chr(code).encode()[0] for code in (low, high))
        bits |= (2 << last) - (1 << first)
    return bits
