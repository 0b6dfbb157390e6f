"""Regular expressions for strings in JSON, without what llguidance misreads there."""

import re

# An escaped character, a set, and any other character.
PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^][\\])*\]|.", re.DOTALL)


def without_null(pattern: str) -> str:
    """Take the null character out of every set.

    In llguidance 1.9 a set that contains it also matches escaped quotes and backslashes: `[^"]*` matches `a\\"b`.

    Example: `[^"]+` becomes `[[^"]--\\x00]+`.
    """

    def replaced(part: re.Match[str]) -> str:
        is_set = len(part[0]) > 2 and part[0].startswith("[")
        return rf"[{part[0]}--\x00]" if is_set else part[0]

    return PART.sub(replaced, pattern)
