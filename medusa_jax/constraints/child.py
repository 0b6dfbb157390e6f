"""Compiles one constraint, from stdin to stdout, in a process with limits on time and memory.

llguidance decides whether an expression matches anything before its own limits count: an intersection of
expressions, or multipleOf 99999989, takes minutes and gigabytes, and rules of 3,000 levels overflow the
stack. Nothing within a process bounds that.
"""

import contextlib
import json
import re
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any

# A rule of GBNF; Lark's have one colon.
GBNF = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
# Tokens that are tried.
STEPS = 3
# Bytes of stack, less than threads of the server have.
STACK = 4 << 20
# Tokens by number, which the trial's vocabulary need not have.
NUMBERED = re.compile(r"<\[\^?[\d,]+\]>")


def grammar_of(guidance: Any, kind: str, text: str, blanks: str, **tokens: Any) -> str:
    """Return a constraint in llguidance's form.

    Args:
      blanks: expression for the blanks between the parts of JSON.
      tokens: arguments of `gbnf.lark_of`.
    """
    matcher = guidance.LLMatcher
    if kind in ("json_object", "json_schema"):
        schema: Any = text if kind == "json_schema" else {"type": "object"}
        overrides = {"whitespace_pattern": blanks}
        return str(matcher.grammar_from_json_schema(schema, overrides=overrides))
    if kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if kind == "choice":  # one terminal: each alternative of a rule would be an item
        text = f"start: T\nT: {' | '.join(map(json.dumps, json.loads(text)))}"
    elif kind == "grammar" and GBNF.search(text):
        text = neighbour("gbnf")["lark_of"](text, **tokens)
    return str(matcher.grammar_from_lark(text))


def neighbour(name: str) -> dict[str, Any]:
    """Return the functions of a file of this directory."""
    return runpy.run_path(str(Path(__file__).with_name(f"{name}.py")))


def answer(limits: dict[str, Any], **constraint: Any) -> dict[str, str]:
    """Return {"grammar": in llguidance's form}, or {"unreadable" or "refused": why}."""
    import llguidance as guidance

    try:
        grammar = grammar_of(guidance, **constraint)
    except Exception as error:  # parsers raise their own types
        return {"unreadable": str(error)}
    parser = guidance.LLParserLimits(**limits)
    # A grammar without bounds has none with any vocabulary, so the smallest one suffices.
    tokens = guidance.LLTokenizer("byte")
    tried = NUMBERED.sub("<[0]>", grammar)
    matcher = guidance.LLMatcher(tokens, tried, log_level=0, limits=parser)
    for _ in range(STEPS):  # some limits count only after a token
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        first_byte = (bits & -bits).bit_length() - 1
        if matcher.is_accepting() or not 0 <= first_byte < 256:
            break
        matcher.consume_token(first_byte)
    return {"refused": matcher.get_error()} if matcher.is_error() else {"grammar": grammar}


def bound(seconds: float, most_bytes: int) -> None:
    """Limit the process's memory and CPU time. Without a handler the signal SIGPROF ends it."""
    with contextlib.suppress(
        ImportError, OSError, ValueError
    ):  # unsupported by this system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Print the answer to the request on stdin as one line.

    For a Lark grammar a second line follows if a slower check ends in time; the parent takes the last line.
    """
    request = json.load(sys.stdin)
    sys.path = request.pop("paths")
    bound(request.pop("seconds"), request.pop("most_bytes"))
    answered = answer(**request)
    print(json.dumps(answered), flush=True)
    if "grammar" in answered and request["kind"] == "grammar":
        import llguidance

        if not GBNF.search(request["text"]):
            reason = neighbour("overlap")["endless"](llguidance, request["text"])
            print(json.dumps({"refused": reason} if reason else answered))


if __name__ == "__main__":
    threading.stack_size(STACK)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
