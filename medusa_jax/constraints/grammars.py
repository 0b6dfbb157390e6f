"""Constraints compiled for one vocabulary by llguidance, whose masks take tens of microseconds.

It computes each mask on demand, so that compiling takes milliseconds whatever the vocabulary. xgrammar and
outlines-core precompute, which takes seconds and hundreds of megabytes for large schemas.
"""

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.constraints.constraint import Constraint
from medusa_jax.constraints.guide import Guide, engine_message
from medusa_jax.errors import UserError
from medusa_jax.text.token_bytes import TokenBytes
from medusa_jax.text.tokenizer import NoTokenizer, Tokenizer
from medusa_jax.whole_files import Json

# Between the parts of JSON: without a bound, small models write blanks for ever.
BLANKS = r"\n? {0,8}"
# Number of compiled constraints to keep, of about 60 MB at most.
KEPT = 8
# Bounds of llguidance: on states (about 2 kB each), on work for a mask (milliseconds), on items at one
# place (alternatives, properties), on a grammar.
LIMITS = {
    "max_lexer_states": 50_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 100_000,
    "max_items_in_row": 20_000,
    "max_grammar_size": 200_000,
    "initial_lexer_fuel": 1_000_000,
    "verbose_errors": False,
}
# In place of a message that names an option of llguidance.
OVERLAP = "its oneOf needs schemas that their types or a constant property tell apart; anyOf takes any"
# Memory of the child process that tries to compile a constraint. It bounds the work, so the answer does not
# depend on the machine's speed: costly expressions grow by about 100 MB in a second.
MOST_BYTES = 256 << 20
# The last resort, for what takes time without memory: CPU seconds of the child, and seconds on the clock.
CPU_SECONDS, WALL_SECONDS = 20.0, 300.0
CHILD = Path(__file__).with_name("child.py")


class Grammars:
    """The constraints of one tokenizer. Threads may share it.

    Args:
      vocab_size: of the model, which may have more tokens than the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._compiled = lru_cache(KEPT)(self._compile)
        self._vocabulary = lru_cache(KEPT)(self._make_vocabulary)

    def guide(self, constraint: Constraint, eos_ids: Sequence[int]) -> Guide:
        """Return the guide of one text, at its beginning.

        Args:
          eos_ids: the tokens that end it.

        Raises:
          UserError: llguidance is missing; the constraint cannot be read, met or compiled within the
            bounds; no token ends a text, or there is no tokenizer.
        """
        ends = tuple(sorted(i for i in set(eos_ids) if i < self._vocab_size))
        matcher, allowed_W = self._compiled(constraint, ends)  # others do not wait for it
        with self._lock:
            matcher = matcher.deep_copy()
        return Guide(matcher, allowed_W, self._vocabulary(ends)[0], ends)

    def _make_vocabulary(self, ends: tuple[int, ...]) -> tuple["Vocabulary", Any]:
        guidance = _llguidance()
        if isinstance(self._tokenizer, NoTokenizer):
            raise self._tokenizer.missing("constraints cannot be told in tokens")
        if not ends:
            raise UserError(
                "a constraint needs a token that ends the text: eos_ids has none of this model"
            )
        vocabulary = Vocabulary(self._tokenizer, self._vocab_size, ends)
        wrapper, size = guidance.TokenizerWrapper(vocabulary), self._vocab_size
        return vocabulary, guidance.LLTokenizer(wrapper, n_vocab=size, eos_token=list(ends))

    def _named_tokens(self, constraint: Constraint) -> dict[str, int]:
        """The tokens that a GBNF grammar may name by their text, as llama.cpp finds them."""
        if constraint.kind != "grammar" or "::=" not in constraint.text:
            return {}
        texts = {*re.findall(r"<[^\[>][^>]*>", constraint.text)}
        found = {text: self._tokenizer.encode(text) for text in texts}
        return {text: ids[0] for text, ids in found.items() if len(ids) == 1}

    def _compile(
        self, constraint: Constraint, ends: tuple[int, ...]
    ) -> tuple[Any, np.ndarray]:
        guidance = _llguidance()
        vocabulary, tokens = self._vocabulary(ends)
        kind = constraint.kind.replace("_", " ")
        reply = try_to_compile(constraint, self._named_tokens(constraint), ends)
        if "too_costly" in reply:
            raise UserError(
                f"the {kind} is too costly: it takes more than {reply['too_costly']} to compile"
            )
        if "unreadable" in reply:
            raise UserError(
                f"the {kind} cannot be read: {engine_message(reply['unreadable'])}"
            )
        if reason := engine_message(reply.get("refused", "")):
            reason = OVERLAP if "coerce_one_of" in reason else reason
            reason = "no text meets it" if reason == "NoExtensionBias" else reason
            raise UserError(f"the {kind} cannot be used: {reason}")
        limits = guidance.LLParserLimits(**LIMITS)
        matcher = guidance.LLMatcher(tokens, reply["grammar"], log_level=0, limits=limits)
        if matcher.is_error():
            raise UserError(
                f"the {kind} cannot be used: {engine_message(matcher.get_error())}"
            )
        allowed_W = vocabulary.ordinary_W.copy()
        if constraint.kind == "grammar":  # special tokens that it names
            for token in map(int, re.findall(r"<\[(\d+)\]>", reply["grammar"])):
                allowed_W[token >> 5] |= np.uint32(1 << (token & 31))
        for order in (vocabulary.single_bytes, vocabulary.single_bytes[::-1]):
            guide = Guide(matcher.deep_copy(), allowed_W, vocabulary, ends)
            if not guide.possible:
                raise UserError(
                    f"the {kind} cannot be met: no token of the model may come first"
                )
            guide.try_ahead(order)
        return matcher, allowed_W


def try_to_compile(
    constraint: Constraint, tokens: dict[str, int] | None = None, ends: Sequence[int] = ()
) -> Json:
    """Compile a constraint in a child process with limits.

    Args:
      tokens, ends: as for `gbnf.lark_of`.

    Returns: the child's answer, or {"too_costly": the limit that it met}.
    """
    request: Json = {
        "kind": constraint.kind,
        "text": constraint.text,
        "blanks": BLANKS,
        "tokens": tokens or {},
        "ends": list(ends),
        "paths": [path for path in sys.path if path],
        "seconds": CPU_SECONDS,
        "most_bytes": MOST_BYTES,
        "limits": LIMITS,
    }
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-S", str(CHILD)],
            input=json.dumps(request),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=WALL_SECONDS,
            start_new_session=True,  # Ctrl-C is for the parent
        )
    except subprocess.TimeoutExpired:
        return {"too_costly": f"{WALL_SECONDS:g} s"}
    try:
        answer: Json = json.loads(process.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        if -process.returncode == getattr(signal, "SIGPROF", None):
            return {"too_costly": f"{CPU_SECONDS:g} s"}
        return {"too_costly": f"{MOST_BYTES >> 20} MiB"}  # or a stack of 4 MiB
    return answer


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UserError(
            "constrained output needs llguidance: pip install 'medusa-jax[guided]'"
        ) from error
    return llguidance


class Vocabulary:
    """The bytes of every token, in the form of llguidance's `TokenizerWrapper`.

    Attributes:
      ordinary_W: bits of the tokens that a text may hold: all but special ones that do not end it.
      byte_ids: the tokens of one byte.
      single_bytes: the tokens of one byte that is not a blank, ascending.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, ends: tuple[int, ...]
    ) -> None:
        token_bytes, backend = TokenBytes(tokenizer), tokenizer.backend
        added = backend.get_added_tokens_decoder() if backend else {}
        special = {i for i, token in added.items() if token.special and i < vocab_size}
        self._tokenizer = tokenizer
        self.tokens = [token_bytes.of(i) for i in range(vocab_size)]
        self.eos_token_id, self.bos_token_id = ends[0], tokenizer.bos_id
        self.special_token_ids = sorted({*ends, *special})
        self._id_of = {
            text: i for i, text in enumerate(self.tokens) if text and i not in special
        }
        singles = sorted(text for text in self._id_of if len(text) == 1)
        self.byte_ids = {text[0]: self._id_of[text] for text in singles}
        self.single_bytes = [self._id_of[text] for text in singles if not text.isspace()]
        self._longest = max(map(len, self._id_of), default=0)
        allowed = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        allowed[:vocab_size] = 1
        allowed[sorted(special - set(ends))] = 0
        self.ordinary_W = np.packbits(allowed, bitorder="little").view(np.uint32)

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the first tokens of a text that is within another.

        At each mask llguidance asks for the whole text that a grammar forces, and needs the first tokens.
        """
        data = text.encode() if isinstance(text, str) else text
        data = data[: 64 + self._longest]
        ids = self._tokenizer.encode(data.decode(errors="replace"))
        if b"".join(self.tokens[i] for i in ids) == data:
            return ids
        # Blanks that a tokenizer puts first, or unknown characters: the longest tokens that fit.
        ids, at = [], 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            fits = (self._id_of.get(data[at : at + n]) for n in sizes)
            token = next((i for i in fits if i is not None), None)
            if token is None:
                break
            ids.append(token)
            at += len(self.tokens[token])
        return ids
