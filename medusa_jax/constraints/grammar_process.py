"""Constraints compiled on trial, in the child process of `grammars.py`.

llguidance decides whether an expression matches anything before its limits count: an intersection of
expressions, or multipleOf 99999989, takes minutes and gigabytes, and rules of 3,000 levels overflow the stack.
"""

import json
import re
import runpy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# A rule of GBNF; Lark's have one colon.
GBNF = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
# Tokens that are tried.
STEPS = 3
# Less than threads of the server have.
STACK = 4 << 20


def make_answer(limits: dict[str, Any], blanks: str) -> Callable[[Any], Any]:
    """Kind and text of a constraint -> {"grammar": in llguidance's form}, or {"unreadable" or "refused": why}.

    Args:
      limits: of llguidance's parser.
      blanks: expression for what is between the parts of JSON.
    """
    import llguidance

    tokens = llguidance.LLTokenizer(
        "byte"
    )  # what is unbounded does not depend on the vocabulary
    lark_of = runpy.run_path(str(Path(__file__).with_name("gbnf.py")))["lark_of"]
    parser_limits = llguidance.LLParserLimits(**limits)
    threading.stack_size(STACK)
    pool = ThreadPoolExecutor(1)

    def grammar_of(kind: str, text: str) -> str:
        if kind in ("json_object", "json_schema"):
            schema: Any = text if kind == "json_schema" else {"type": "object"}
            overrides: Any = {"whitespace_pattern": blanks}
            return llguidance.LLMatcher.grammar_from_json_schema(
                schema, overrides=overrides
            )
        if kind == "regex":
            return llguidance.LLMatcher.grammar_from_regex(text)
        if kind == "choice":  # one terminal: each alternative of a rule would be an item
            text = f"start: T\nT: {' | '.join(map(json.dumps, json.loads(text)))}"
        elif kind == "grammar" and GBNF.search(text):
            text = lark_of(text)
        return llguidance.LLMatcher.grammar_from_lark(text)

    def answer_to(request: Any) -> dict[str, object]:
        try:
            grammar = grammar_of(request["kind"], request["text"])
        except MemoryError:
            raise
        except Exception as error:  # parsers raise their own types
            return {"unreadable": str(error)}
        matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=parser_limits)
        for _ in range(STEPS):  # some limits count only after a token
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            lowest = (bits & -bits).bit_length() - 1
            if matcher.is_accepting() or not 0 <= lowest < 256:
                break
            matcher.consume_token(lowest)
        return (
            {"refused": matcher.get_error()} if matcher.is_error() else {"grammar": grammar}
        )

    return lambda request: pool.submit(answer_to, request).result()
