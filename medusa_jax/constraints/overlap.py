"""Find Lark terminals that, by longest match, swallow the terminal that must follow, so that an answer cannot end.

Runs in the child process of `child.py`, which does not import the package.
"""

import re
from collections.abc import Iterator
from typing import Any

TOKEN = re.compile(r'"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|[A-Za-z_]\w*|\S')
# A rule, its attributes such as [lazy], and its body, which goes on in lines that are indented.
RULE = re.compile(
    r"^[?!]?([a-z_]\w*)[ \t]*(\[.*?\])?[ \t]*:(.*(?:\n[ \t]+.*)*)", re.MULTILINE
)
MOST_PAIRS = 20


def endless(guidance: Any, text: str) -> str:
    """Return why an answer would run to its limit, or "".

    Only terminals that follow each other at once in a rule are looked at.
    """
    if "%ignore" in text:
        return ""  # ignored text ends a terminal
    for one, other in list(_pairs(re.sub(r"(?m)^\s*(//|#).*", "", text)))[:MOST_PAIRS]:
        first = _first(guidance, text, other)
        letters = "".join(f"\\x{byte:02x}" for byte in range(128) if first >> byte & 1)
        # Text that ends with a letter of the other, and is not the whole of the one.
        if letters and not first >> 128:
            overlap = f"({one} /[{letters}]/) & ~({one})"
            if not _first(guidance, text, overlap):
                return (
                    f"{one} takes its longest match, so {other} never follows it: "
                    "write both as one terminal"
                )
    return ""


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    rules = {m[1]: TOKEN.findall(m[3]) for m in RULE.finditer(text) if not m[2]}

    def terminal(token: str) -> str:
        """The terminal that a token is, or that its rule consists of; "" for others."""
        for _ in range(9):
            if len(rules.get(token, ())) == 1:
                [token] = rules[token]
        return token if token[0] in '"/' or token.isupper() else ""

    for body in rules.values():
        for one, other, after in zip(body, body[1:], [*body[2:], ""]):
            pair = terminal(one), terminal(other)
            if all(pair) and after not in ("?", "*", "{", "~"):
                yield pair


def _first(guidance: Any, text: str, terminal: str) -> int:
    """Return the bytes that a terminal may begin with, as bits; -1 if it cannot be read."""
    renamed = re.sub(r"\bstart\b", "start_", text)
    matcher = guidance.LLMatcher
    try:
        lark = matcher.grammar_from_lark(f"start: WHOLE\nWHOLE: {terminal}\n{renamed}")
        rule_matcher = matcher(guidance.LLTokenizer("byte"), lark, log_level=0)
        bits = int.from_bytes(rule_matcher.compute_bitmask(), "little") & (1 << 256) - 1
    except Exception:  # parsers raise their own types
        return -1
    if rule_matcher.is_error():
        return 0 if rule_matcher.get_error().startswith("NoExtension") else -1
    return bits
