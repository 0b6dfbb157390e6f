"""GBNF, llama.cpp's notation of grammars, as llguidance takes it.

Runs in the child process of `grammars.py`, which does not import the package.
"""

import re
from typing import Any, NamedTuple

# Most characters of a rule as a regular expression.
MOST_CHARACTERS = 1 << 21
LAST, SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)

TOKEN = re.compile(
    r"""(?P<space>(?:[ \t]|\#[^\r\n]*)+) | (?P<newline>[\r\n]+) | (?P<define>::=)
    | (?P<name>[\w-]+) | (?P<literal>"(?:\\.|[^"\\])*") | (?P<set>\[(?:\\.|[^\]\\])*\]|\.)
    | (?P<sign>[()|]) | (?P<times>[*+?]|\{\s*(\d+)\s*(,?)\s*(\d*)\s*\})""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
CHARACTER = re.compile(
    r'\\(?:x([\da-fA-F]{2})|u([\da-fA-F]{4})|U([\da-fA-F]{8})|([trn\\"\[\]]))|([^\\])',
    re.DOTALL,
)
CONTROLS = {"t": "\t", "r": "\r", "n": "\n"}
TIMES = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class Node(NamedTuple):
    """A part of a grammar.

    Attributes:
      kind: "set" of characters, "seq" of parts, "alt": one of the parts, "repeat" of a part, or "rule".
      value: ranges of code points, least and most times (None: no limit), or a name.
    """

    kind: str
    parts: tuple["Node", ...] = ()
    value: Any = None

    @property
    def names(self) -> list[str]:
        """The rules that it names."""
        if self.kind == "rule":
            return [self.value]
        return [name for part in self.parts for name in part.names]


def lark_of(text: str) -> str:
    """The Lark grammar of llguidance that has the language of a GBNF grammar.

    In GBNF every split of a text into rules counts, but llguidance's terminals take their longest match. So
    a grammar without recursion is one terminal, and of others each character is one.

    Raises:
      ValueError: it cannot be read; names the line.
    """
    try:
        rules = _Reader(text).rules
        flat, left = dict[str, str](), dict(rules)  # regular expressions of rules
        while ready := [n for n in left if all(name in flat for name in left[n].names)]:
            for name in ready:
                flat[name] = _shown(left.pop(name), flat)
                if len(flat[name]) > MOST_CHARACTERS:
                    del flat[name]  # and no other rule that names it has one
        if "root" in flat:
            return f"start: T\nT: /{flat['root']}/\n"
        names = {name: f"r{i}" for i, name in enumerate(rules)}
        lines = [
            f"{names[name]}: {_shown(rule, names, '/')}" for name, rule in rules.items()
        ]
        return "\n".join([f"start: {names['root']}", *lines, ""])
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _shown(node: Node, rules: dict[str, str], slash: str = "") -> str:
    """A part as a regular expression, or with slashes as a part of a rule.

    Args:
      rules: in place of their names.
    """
    if node.kind == "rule":
        return rules[node.value]
    if node.kind == "set":
        ends = (
            "-".join(f"\\x{{{code:x}}}" for code in dict.fromkeys(r)) for r in node.value
        )
        return f"{slash}[{''.join(ends)}]{slash}"
    parts = [_shown(part, rules, slash) for part in node.parts]
    begin, space, nothing = ("(", " ", '""') if slash else ("(?:", "", "")
    shown = begin + ("|" if node.kind == "alt" else space).join(parts or [nothing]) + ")"
    if node.kind == "repeat":
        least, most = node.value
        shown += f"{{{least},{'' if most is None else most}}}"
    return shown


class _Reader:
    def __init__(self, text: str) -> None:
        # Kind (of a sign itself), text, line, and whether it is the first of its line.
        self._tokens = list[tuple[str, re.Match[str] | None, int, bool]]()
        at, self._line, first = 0, 1, True
        while at < len(text):
            found = TOKEN.match(text, at)
            if not found:
                raise self._problem(f"{text[at : at + 20]!r} is no part of a rule")
            kind = (
                found[0]
                if found["sign"]
                else "times"
                if found["times"]
                else found.lastgroup
            )
            if kind not in ("space", "newline"):
                self._tokens.append((kind or "", found, self._line, first))
            first = kind == "newline" or (first and kind == "space")
            self._line += len(re.findall(r"\r\n?|\n", found[0]))
            at = found.end()
        self._tokens += [("end", None, self._line, True)] * 2
        self._at, self.rules = 0, dict[str, Node]()
        while self._kind() != "end":
            name = self._text()
            if (self._kind(), self._kind(1)) != ("name", "define"):
                raise self._problem(f"a rule begins with its name and ::=, not {name!r}")
            self._at += 2
            self.rules[name] = self._alternatives(nested=False)
        for name in ("root", *(n for rule in self.rules.values() for n in rule.names)):
            if name not in self.rules:
                raise ValueError(f"there is no rule {name!r}")

    def _kind(self, ahead: int = 0) -> str:
        return self._tokens[self._at + ahead][0]

    def _text(self) -> str:
        self._line = self._tokens[self._at][2]
        found = self._tokens[self._at][1]
        return found[0] if found else ""

    def _problem(self, what: str) -> ValueError:
        return ValueError(f"line {self._line}: {what}")

    def _alternatives(self, nested: bool) -> Node:
        sequences = list[Node]()
        while True:
            parts, start = list[Node](), self._at
            while self._kind() not in ("|", ")", "end"):
                new_line = self._tokens[self._at][3] and self._at > start
                if self._kind(1) == "define" or (new_line and not nested):
                    break  # the next rule
                self._part(parts)
            sequences.append(parts[0] if len(parts) == 1 else Node("seq", tuple(parts)))
            if self._kind() != "|":
                alone = len(sequences) == 1
                return sequences[0] if alone else Node("alt", tuple(sequences))
            self._at += 1

    def _part(self, parts: list[Node]) -> None:
        """Read one part, or how often the last one is repeated."""
        (kind, found, *_), text = self._tokens[self._at], self._text()
        self._at += 1
        if kind == "(":
            parts.append(self._alternatives(nested=True))
            if self._kind() != ")":
                raise self._problem("a ')' is missing")
            self._at += 1
        elif kind == "times" and found and parts:
            times = TIMES.get(text)
            if not times:
                *_, least, comma, most = found.groups()
                times = int(least), int(most or least) if most or not comma else None
                if times[1] is not None and times[1] < times[0]:
                    raise self._problem(f"the most in {text!r} is less than the least")
            parts[-1] = Node("repeat", (parts[-1],), times)
        elif kind == "name":
            parts.append(Node("rule", value=text))
        elif kind == "literal":
            codes = [code for code, _ in self._codes(text[1:-1])]
            parts.append(Node("seq", tuple(Node("set", value=((c, c),)) for c in codes)))
        elif kind == "set":
            parts.append(Node("set", value=self._ranges(text)))
        else:
            raise self._problem(f"{text!r} does not belong here")

    def _codes(self, text: str) -> list[tuple[int, bool]]:
        """The code points of a text with escapes, and whether each is written without one."""
        codes, at = list[tuple[int, bool]](), 0
        while at < len(text):
            found = CHARACTER.match(text, at)
            code = int(found[1] or found[2] or found[3] or "0", 16) if found else -1
            if found and (sign := found[4] or found[5]):
                code = ord(CONTROLS.get(sign, sign) if found[4] else sign)
            if not found or code > LAST or SURROGATES[0] <= code <= SURROGATES[1]:
                raise self._problem(f"GBNF has no character {text[at : at + 10]!r}")
            codes.append((code, bool(found[5])))
            at = found.end()
        return codes

    def _ranges(self, text: str) -> tuple[tuple[int, int], ...]:
        """Of [a-z], [^a-z] or the dot."""
        if text == ".":
            return _all_but([SURROGATES])
        negated, ranges, at = text[1] == "^", list[tuple[int, int]](), 0
        codes = self._codes(text[1 + negated : -1])
        while at < len(codes):
            to = 2 * (codes[at + 1 : at + 2] == [(ord("-"), True)] and at + 2 < len(codes))
            ranges.append((codes[at][0], codes[at + to][0]))
            at += 1 + to
        if not ranges or any(low > high for low, high in ranges):
            raise self._problem(f"{text[:20]!r} is no set of characters")
        return _all_but([*(ranges if negated else _all_but(ranges)), SURROGATES])


def _all_but(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """All other code points."""
    left, begin = list[tuple[int, int]](), 0
    for low, high in sorted([*ranges, (LAST + 1, LAST + 1)]):
        if begin < low:
            left.append((begin, low - 1))
        begin = max(begin, high + 1)
    return tuple(left)
