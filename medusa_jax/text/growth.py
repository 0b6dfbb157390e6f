"""How much longer a tokenizer may make a text. Steps that multiply it exhaust the memory, which ends the process."""

import base64
import json
import math
import re
from typing import Any

from medusa_jax.errors import UserError

# Most characters that one may become, of each part of a tokenizer; those in use stay far below it.
MOST_GROWTH = 256
# Matches of these have no character of their own.
WITHOUT_TEXT = re.compile(r"\(\?<?[=!]|\\[bB]")


def check_growth(backend: Any) -> None:
    """Raise a `UserError` if a part of a tokenizer may multiply a text too often."""
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        part = getattr(backend, name)
        times = _growth(json.loads(part.__getstate__())) if part else 1
        if times > MOST_GROWTH:
            raise UserError(
                f"the tokenizer's {name} may make a text {times:.3g} times as long, more than "
                f"{MOST_GROWTH} times, which would fill the memory"
            )


def _growth(step: Any) -> float:
    kind = step["type"]
    if kind == "Sequence":
        [steps] = (value for key, value in step.items() if key != "type")
        return math.prod(map(_growth, steps))
    if kind == "Replace":
        [(form, pattern)] = step["pattern"].items()
        n, matched = len(step["content"]), len(pattern)
        if form == "Regex":
            matched = int(_has_text(pattern))
        return max(1.0, n / matched) if matched else n + 1.0
    if (
        kind == "Precompiled"
    ):  # the size of a trie, the trie, and replacements that end with 0
        data = base64.b64decode(step["precompiled_charsmap"])
        replacements = data[4 + int.from_bytes(data[:4], "little") :]
        return max(1.0, *map(len, replacements.split(b"\0")))
    return 2.0 if kind in ("ByteLevel", "Metaspace") else 1.0


def _has_text(pattern: str) -> bool:
    """Whether each match of an expression has a character; False if that is not certain."""
    try:
        return not (WITHOUT_TEXT.search(pattern) or re.search(pattern, ""))
    except re.error:  # of a form that Python lacks
        return False
