"""The tokens that a constraint allows next in one text, and along the paths of a tree."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np

from medusa_jax.constraints.runs import DIGITS, QUOTE, Layout, forced
from medusa_jax.errors import UserError

T = TypeVar("T")
# `LIMITS` bound the work for each mask. Last resort: masks above SLOW_MASK CPU seconds count against a request's budget
# of SLOW_MASKS seconds. A usual mask takes 50 us, so machine speed hardly matters.
SLOW_MASK, SLOW_MASKS = 0.1, 10.0
# Tokens of a text that is tried before a constraint is used.
TRIED = 64
# Calls of the grammar engine that hold the interpreter for longer take turns (`Patience`).
HELD = 0.005
TURN = threading.Lock()


class Patience:
    """Seconds left for slow calls of the grammar engine, of one text or of all choices of a request.

    Most calls hold the interpreter, so those of one client could stall the texts of others. With a bound,
    slow ones take turns in the whole process, and a pause of the same length follows each.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds, self._is_bounded = seconds, seconds < math.inf
        self._is_slow = False

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call the engine.

        Raises:
          UserError: no time is left.
        """
        if not self._is_bounded:
            return function(*args)
        with TURN if self._is_slow else nullcontext():
            start = time.thread_time()
            result = function(*args)
            seconds = time.thread_time() - start
            if seconds > HELD:
                self._is_slow = True
                time.sleep(seconds)
        self.seconds -= seconds if seconds > SLOW_MASK else 0.0
        if self.seconds < 0:
            raise UserError(
                "the constraint is too costly: its sets of tokens take too long"
            )
        return result


class Guide:
    """A text's place in its grammar.

    Args:
      matcher: llguidance's, of an empty text.
      ordinary_W: bits of the tokens that a text may hold, whatever its grammar says.
      vocabulary: the tokens and their bytes.
      ends: the tokens that end a text.

    Attributes:
      consumed: tokens of the text so far.
      possible: whether any token may come first.
      first_W: bits of the tokens that may come first.
      patience: bounds the engine's calls.
      error: why the text cannot continue, if a thread failed.
      begun: the work of its next step and the future of its end, where threads do it (`GuideThreads`).
    """

    def __init__(
        self, matcher: Any, ordinary_W: np.ndarray, vocabulary: Any, ends: Sequence[int]
    ) -> None:
        self._vocabulary, self._layout = vocabulary, Layout()
        self._start, self._matcher = matcher, matcher.deep_copy()
        self._text: list[int] = []
        self._ends = frozenset(ends)
        self._ordinary_W = ordinary_W
        self.consumed, self.patience, self.error = 0, Patience(), ""
        self.begun: Any = None
        self.first_W = np.zeros_like(ordinary_W)
        self.possible = self.fill(self.first_W)

    def try_ahead(self, order: Sequence[int]) -> None:
        """Write the beginning of a text, always with the first of these tokens that may come.

        Whether a limit is met depends on the vocabulary: a token such as `","` reaches into the properties after it.

        Raises:
          UserError: as `fill`.
        """
        bits_W, self.patience = self.first_W.copy(), Patience(SLOW_MASKS)
        for _ in range(TRIED):
            token = next((i for i in order if holds(bits_W, i)), None)
            if token is None:
                return
            self.advance([token])
            self.fill(bits_W)

    def fill(self, into_W: np.ndarray) -> bool:
        """Write the bits of the tokens that may come next; False if there are none.

        Raises:
          UserError: a limit of the grammar engine was met, or masks took too long.
        """
        is_possible = self._mask(into_W)
        self._check()
        return is_possible

    def _mask(self, into_W: np.ndarray) -> bool:
        mask = self._matcher.unsafe_compute_mask_ptr
        self.patience.call(mask, into_W.ctypes.data, into_W.nbytes)
        into_W &= self._ordinary_W
        return not self._matcher.is_error() and bool(into_W.any())

    def _check(self) -> None:
        """Raise the matcher's error. The tokens so far were allowed, so it is a limit, or characters that no token has.

        "NoExtension" only says that nothing may follow them.
        """
        if not self._matcher.is_error():
            return
        error = engine_message(self._matcher.get_error())
        if error.startswith("NoExtension"):
            return
        if "doesn't satisfy the grammar" in error:
            raise UserError(
                "the constraint cannot be met: the model has no token for what must come next"
            )
        raise UserError(f"the constraint is too costly for its grammar engine: {error}")

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        self.consumed += len(tokens)
        for token in tokens:
            if token in self._ends:
                return
            self._text.append(token)
            self._layout.read(self._vocabulary.tokens[token])
            self._consume(token)
        self._check()

    def fill_chain(self, nodes_M: np.ndarray, chain_C: np.ndarray) -> int:
        """Fill a chain after the root with the tokens that follow; return how many are forced.

        If none is forced, tokens that were copied from the text stay. If none were copied, the chain may end the string
        or number that the text is in, and hold what must follow.

        Args:
          nodes_M: tokens of the nodes, the root first; the root is consumed already.
          chain_C: the chain's nodes.
        """
        layout, byte_ids = self._layout, self._vocabulary.byte_ids
        run = self.patience.call(forced, self._matcher, layout, byte_ids)
        is_forced = run and layout.last not in DIGITS  # a number may go on
        if not is_forced and nodes_M[chain_C[0]] != nodes_M[0]:
            return 0  # without a match, the root's token is copied
        if layout.in_string and not run:
            matcher, end = self._matcher.deep_copy(), bytes([QUOTE])
            if matcher.try_consume_tokens([byte_ids.get(QUOTE, 0)]):
                rest = matcher, layout.after(end), byte_ids
                run = end + self.patience.call(forced, *rest)
        tokens = self._vocabulary(run)[: len(chain_C)] if run else []
        nodes_M[chain_C[: len(tokens)]] = tokens
        return len(tokens) if is_forced else 0

    def fill_tree(
        self,
        nodes_M: np.ndarray,
        children: Sequence[Sequence[int]],
        guesses_MK: np.ndarray | None,
        into_MW: np.ndarray,
    ) -> None:
        """Replace drafts that may not follow their parents, and write the bits of the tokens that may follow each node.

        Drafts are replaced by the token that the grammar forces, if it leaves one text only, else by the best guess that
        it allows and that no sibling has, or by the end of the text. Nodes that stay forbidden, and those after them, keep
        their bits. A node that nothing may follow gets a token that is forbidden there, so that it is not accepted: plain
        decoding ends in the step after it.

        Args:
          nodes_M: tokens of the nodes, the root first; the root is consumed already.
          children: of each node.
          guesses_MK: tokens that are likely after each node, the best first; negative ones are none. None replaces no
            drafts.
          into_MW: its first row is filled in already.
        """

        def others(node: int) -> Iterator[int]:
            if guesses_MK is not None:
                yield from self._matcher.compute_ff_tokens()[:1]
                yield from guesses_MK[node].tolist()
                yield from self._ends

        def visit(node: int, path: list[int]) -> None:
            siblings, candidates, may_follow = children[node], others(node), into_MW[node]
            for child in siblings:
                token = int(nodes_M[child])
                if not holds(may_follow, token):
                    unused = (t for t in candidates if t not in nodes_M[siblings])
                    if (token := next((t for t in unused if holds(may_follow, t)), -1)) < 0:
                        continue
                    nodes_M[child] = token
                if token in self._ends:
                    into_MW[child] = ~np.uint32(0)  # every token is allowed
                    continue
                if self._consume(token) and self._mask(into_MW[child]):
                    visit(child, [*path, token])
                else:
                    nodes_M[child] = self._forbidden(may_follow)
                self._take_back(path)

        visit(0, [])

    def _consume(self, token: int) -> bool:
        return self.patience.call(self._matcher.consume_token, token)

    def _take_back(self, path: Sequence[int]) -> None:
        """Undo the last token; `path` has the earlier ones that are not in the text yet."""
        if self._matcher.is_error():  # for good: nothing can be taken back
            self._matcher = self._start.deep_copy()
            self.patience.call(self._matcher.consume_tokens, [*self._text, *path])
        else:
            self._matcher.rollback(1)

    @staticmethod
    def _forbidden(allowed_W: np.ndarray) -> int:
        """Return a token whose bit is not set."""
        bits = np.unpackbits(allowed_W.view(np.uint8), bitorder="little")
        return int(np.argmin(bits))


def holds(bits_W: np.ndarray, token: int) -> bool:
    """Whether a set of tokens has this one."""
    return token >= 0 and bool(int(bits_W[token >> 5]) >> (token & 31) & 1)


def engine_message(error: Any) -> str:
    """Return the first line of the engine's message, which may show the whole grammar, and a parser's `error: ` line."""
    first, *lines = str(error).strip().splitlines() or [""]
    note = next((line.strip() for line in lines if line.strip().startswith("error: ")), "")
    return f"{first[:200]} {note[:100]}".strip()
