"""GBNF, llama.cpp's notation of grammars, as a Lark grammar of llguidance.

Runs in the child process of `child.py`, which does not import the package.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Most characters of a rule as a regular expression.
MOST_CHARACTERS = 1 << 21
LAST, SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)

TOKEN = re.compile(
    r"""(?P<space>(?:[ \t]|\#[^\r\n]*)+) | (?P<newline>\r\n?|\n) | (?P<define>::=)
    | (?P<name>[\w-]+) | (?P<literal>"(?:\\.|[^"\\])*") | (?P<set>\[(?:\\.|[^\]\\])*\]|\.)
    | (?P<token>!?<[^>]*>) | (?P<sign>[()|]) | (?P<times>[*+?]|\{\s*(\d+)\s*(,?)\s*(\d*)\s*\})""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
CHARACTER = re.compile(
    r'\\(?:x([\da-fA-F]{2})|u([\da-fA-F]{4})|U([\da-fA-F]{8})|([trn\\"\[\]-]))|([^\\])',
    re.DOTALL,
)
CONTROLS = {"t": "\t", "r": "\r", "n": "\n"}
TIMES = {"*": "{0,}", "+": "{1,}", "?": "{0,1}"}


class Token(NamedTuple):
    """A token of the grammar; `first` tells whether it is the first of its line."""

    kind: str
    found: re.Match[str]
    line: int
    first: bool


class Part(NamedTuple):
    """A part of a rule: a "set" (a regular expression), a rule by "name", a "token", "nothing", or a "sign"."""

    kind: str
    text: str
    times: str = ""


NOTHING = Part("nothing", "")


def lark_of(text: str, tokens: Mapping[str, int] = {}, ends: Sequence[int] = ()) -> str:
    """Return the Lark grammar with the language of a GBNF grammar.

    In GBNF every split of a text into rules counts, but llguidance's terminals take their longest match.
    A grammar without recursion therefore becomes one terminal. With recursion or tokens, every character is a terminal.

    Args:
      tokens: by their text in angle brackets, such as "<think>".
      ends: tokens that end a text, which `!<think>` does not allow.

    Raises:
      ValueError: the grammar cannot be read; names the line.
    """
    rules = _read(_tokens(text), tokens, ends)
    names = {
        name: [p.text for p in rule if p.kind == "name"] for name, rule in rules.items()
    }
    for name in ("root", *(one for used in names.values() for one in used)):
        if name not in rules:
            raise ValueError(f"there is no rule {name!r}")
    flat = dict[str, str]()  # rules as regular expressions
    pending = {n for n, rule in rules.items() if all(p.kind != "token" for p in rule)}
    while resolved := [name for name in pending if all(one in flat for one in names[name])]:
        for name in resolved:
            pending.remove(name)
            pattern = "".join(_shown(part, flat) for part in rules[name])
            if (
                len(pattern) <= MOST_CHARACTERS
            ):  # otherwise no rule that names it has one either
                flat[name] = f"(?:{pattern})"
    if "root" in flat:
        return f"start: T\nT: /{flat['root']}/\n"
    numbered = {name: f"r{i}" for i, name in enumerate(rules)}
    lines = [
        f"{numbered[name]}: {' '.join(_shown(part, numbered, '/') for part in rule)}"
        for name, rule in rules.items()
    ]
    return "\n".join([f"start: {numbered['root']}", *lines, ""])


def _shown(part: Part, rules: dict[str, str], slash: str = "") -> str:
    """Return a part in a regular expression, or with slashes in a rule.

    Args:
      rules: in place of their names.
    """
    pattern = part.text
    if part.kind == "name":
        pattern = rules[part.text]
    elif part.kind == "set":
        pattern = f"{slash}{part.text}{slash}"
    elif part.kind == "nothing":
        pattern = '("")' if slash else "(?:)"
    elif pattern == "(" and not slash:
        pattern = "(?:"
    return pattern + part.times


def _problem(line: int, message: str) -> ValueError:
    return ValueError(f"line {line}: {message}")


def _tokens(text: str) -> list[Token]:
    tokens, at, line, first = list[Token](), 0, 1, True
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match:
            raise _problem(line, f"{text[at : at + 20]!r} is not part of a rule")
        kind = "times" if match["times"] else match.lastgroup or ""
        if kind not in ("space", "newline"):
            tokens.append(Token(kind, match, line, first))
        first = kind == "newline" or (first and kind == "space")
        line += len(re.findall(r"\r\n?|\n", match[0]))
        at = match.end()
    return tokens


def _read(
    tokens: list[Token], ids: Mapping[str, int], text_ends: Sequence[int]
) -> dict[str, list[Part]]:
    """Return the parts of each rule."""
    rules, parts, depth, line = dict[str, list[Part]](), list[Part](), 0, 1
    kinds = [token.kind for token in tokens]
    for i, (kind, match, line, first) in enumerate(tokens):
        text, defines = match[0], kinds[i : i + 2] == ["name", "define"]
        if kinds[max(0, i - 1) : i + 1] == ["name", "define"]:
            continue
        ends = first and not depth and not _is_open(parts) and text != "|"
        if defines or ends or not rules:
            _end_rule(parts, depth, line)
            if not defines:
                raise _problem(line, f"a rule begins with its name and ::=, not {text!r}")
            rules[text] = parts = []
        elif text == "(":
            parts.append(Part("sign", text))
            depth += 1
        elif kind == "sign":
            if text == ")" and not depth:
                raise _problem(line, f"a rule begins with its name and ::=, not {text!r}")
            _end_sequence(parts)
            parts.append(Part("sign", text))
            if text == ")":
                depth -= 1
        elif kind == "times" and not _is_open(parts):
            parts[-1] = parts[-1]._replace(times=parts[-1].times + _times(match, line))
        elif kind == "name":
            parts.append(Part("name", text))
        elif kind == "set":
            parts.append(_set(text, line))
        elif kind == "token":
            name = text.removeprefix("!")
            number = re.fullmatch(r"<\[(\d+)\]>", name)
            if not number and name not in ids:
                raise _problem(line, f"{name[:40]!r} is not one token of the model")
            token = int(number[1]) if number else ids[name]
            others = ",".join(map(str, sorted({token, *text_ends})))
            parts.append(
                Part("token", f"<[^{others}]>" if name != text else f"<[{token}]>")
            )
        elif kind == "literal":
            letters = [_class([(code, code)]) for code, _ in _codes(text[1:-1], line)]
            group = [Part("sign", "("), *(letters or [NOTHING]), Part("sign", ")")]
            parts += letters if len(letters) == 1 else group
        else:
            raise _problem(line, f"{text!r} does not belong here")
    _end_rule(parts, depth, line)
    return rules


def _is_open(parts: list[Part]) -> bool:
    """Whether a sequence has just begun."""
    return not parts or (parts[-1].kind == "sign" and parts[-1].text != ")")


def _end_rule(parts: list[Part], depth: int, line: int) -> None:
    if depth:
        raise _problem(line, "a ')' is missing")
    _end_sequence(parts)


def _end_sequence(parts: list[Part]) -> None:
    """Write an empty sequence out."""
    if _is_open(parts):
        parts.append(NOTHING)


def _times(match: re.Match[str], line: int) -> str:
    if match[0] in TIMES:
        return TIMES[match[0]]
    low, comma, high = match.groups()[-3:]
    if high and int(high) < int(low):
        raise _problem(line, f"the most in {match[0]!r} is less than the least")
    return f"{{{low},{high if comma else low}}}"


def _codes(text: str, line: int) -> list[tuple[int, bool]]:
    """Return the code points of a text with escapes, and whether each is written without one."""
    codes, at = list[tuple[int, bool]](), 0
    while at < len(text):
        match = CHARACTER.match(text, at)
        code = int(match[1] or match[2] or match[3] or "0", 16) if match else -1
        if match and (sign := match[4] or match[5]):
            code = ord(CONTROLS.get(sign, sign) if match[4] else sign)
        if not match or code > LAST or SURROGATES[0] <= code <= SURROGATES[1]:
            raise _problem(line, f"GBNF has no character {text[at : at + 10]!r}")
        codes.append((code, bool(match[5])))
        at = match.end()
    return codes


def _set(text: str, line: int) -> Part:
    """Read [a-z], [^a-z] or the dot."""
    if text == ".":
        return _class([(0, LAST)])
    negated, ranges, at = text[1] == "^", list[tuple[int, int]](), 0
    codes = _codes(text[1 + negated : -1], line)
    while at < len(codes):
        is_range = codes[at + 1 : at + 2] == [(ord("-"), True)] and at + 2 < len(codes)
        last = at + 2 if is_range else at
        ranges.append((codes[at][0], codes[last][0]))
        at = last + 1
    if not ranges or any(low > high for low, high in ranges):
        raise _problem(line, f"{text[:20]!r} is not a set of characters")
    return _class(ranges, negated)


def _class(ranges: list[tuple[int, int]], negated: bool = False) -> Part:
    """Return a set as a regular expression, which has no surrogates."""
    escaped = "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges)
    return Part("set", f"[{'^' * negated}{escaped}]")
