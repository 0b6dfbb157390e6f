"""Stream the texts of a batch: whole characters, cut at stop strings."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from medusa_jax.api.compiling import Compiling
from medusa_jax.api.results import Options, Piece, Result, results_of
from medusa_jax.decoding import generation
from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.decoding.state import DecodeState, Engine, Progress
from medusa_jax.decoding.stopping import RUNNING
from medusa_jax.sharding import Params
from medusa_jax.text.tokenizer import StreamDecoder, Tokenizer

# (new pieces of all rows, None), or at the end ([], the results).
Chunk = tuple[list[Piece], list[Result] | None]
# Called with the number of new tokens of every row [B] during decoding.
OnTokens = Callable[[np.ndarray], None]
# A row and its result.
OnEnd = Callable[[int, Result], None]
# Reads the prompts: `generation.begin`, or on a cache that has some of them.
Begin = Callable[[Engine, Params, DecodeRequest], tuple[DecodeState, list[int]]]


class StoppingText:
    """Text of one row so far; holds back text that may begin a stop string.

    Args:
      stop, stop_ids: strings and tokens that end the text and are cut off. The text of a special token, which
        decoding skips, stands for the token.
      least: they are not looked for in the first `least` tokens.
      prompt: token ids before it.

    Attributes:
      stop_reason: `Result.finish_reason` of a text that has ended here.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        stop_ids: Collection[int] = (),
        least: int = 0,
        prompt: Sequence[int] = (),
    ) -> None:
        self._decoder = StreamDecoder(tokenizer, prompt)
        self._stop = [s for s in stop if s]
        special = {tokenizer.token_to_id(s) for s in stop} & tokenizer.special_ids
        self._stop_ids, self._least = special | {*stop_ids}, least
        self._held = ""
        self.text = ""
        self.stopped, self.stop_reason = False, "stop"
        self.tokens_used = 0

    def push(self, token: int) -> str:
        """Add a token; returns the text that may be shown."""
        if self.stopped:
            return ""
        self.tokens_used += 1
        if token in self._stop_ids and self.tokens_used > self._least:
            tail = self.flush()
            self.stopped = True
            return tail
        text = self._decoder.push([token])
        if self.tokens_used <= self._least:
            self.text += text
            return text
        return self._release(text, final=False)

    def take(
        self, tokens: Sequence[int], depths: Sequence[int], is_end: bool
    ) -> list[tuple[str, int]]:
        """Add tokens; returns the text that may be shown, in pairs of text and draft depth.

        Args:
          depths: the tree depths that they were accepted at, as in `Result.draft_depths`.
          is_end: the row ends after them.
        """
        parts = [
            (piece, depth)
            for token, depth in zip(tokens, depths)
            if (piece := self.push(token))
        ]
        if is_end and (tail := self.flush()):
            parts.append((tail, 0))
        return parts

    def flush(self) -> str:
        """Return the remaining text after the row has ended."""
        return "" if self.stopped else self._release(self._decoder.flush(), final=True)

    def _release(self, text: str, final: bool) -> str:
        self._held += text
        if ends := self._ends():
            out, self.stopped = self._held[: min(ends)], True
        else:
            keep = 0 if final else self._beginning()
            out = self._held[: len(self._held) - keep]
        self._held = self._held[len(out) :]
        self.text += out
        return out

    def _ends(self) -> list[int]:
        """Places in the held text where it ends."""
        return [at for s in self._stop if (at := self._held.find(s)) >= 0]

    def _beginning(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        max_length = max((len(s) for s in self._stop), default=1) - 1
        for n in range(min(max_length, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-n:]) for s in self._stop):
                return n
        return 0


class GrowingTexts:
    """The texts of all rows; reads the progress of the decode loop."""

    def __init__(self, rows: Sequence[StoppingText]) -> None:
        self.rows = rows
        self._ended = np.zeros(len(self.rows), bool)

    def take(self, progress: Progress) -> list[Piece]:
        """The new text of each row that may be shown."""
        tokens, depths = np.asarray(progress.tokens_BO), np.asarray(progress.depth_BO)
        counts = np.asarray(progress.n_new_B)
        self._ended = np.asarray(progress.status_B) != RUNNING
        pieces = []
        for row, text in enumerate(self.rows):
            if text.stopped:
                continue
            span = slice(text.tokens_used, int(counts[row]))
            ids, levels = tokens[row, span].tolist(), depths[row, span].tolist()
            parts = text.take(ids, levels, bool(self._ended[row]))
            if parts:
                pieces.append(Piece(row, parts))
        return pieces

    @property
    def stopped_B(self) -> np.ndarray:
        """Rows that have met a stop string."""
        return np.array([text.stopped for text in self.rows])

    @property
    def ended_B(self) -> np.ndarray:
        """Rows that have ended, on the device or at a stop string."""
        return self.stopped_B | self._ended


def stream_rows(
    tokenizer: Tokenizer,
    rows: Sequence[Options],
    engine: Engine,
    variables: Params,
    request: DecodeRequest,
    compiling: Compiling | None = None,
    watch: OnTokens | None = None,
    ended: OnEnd | None = None,
    begin: Begin = generation.begin,
    keep: generation.Keep | None = None,
) -> Iterator[Chunk]:
    """Decode a batch with stop strings: a row that reaches one is cut there.

    The device starts the next chunk of steps before the host looks for stop strings in the last one,
    so rows do not wait for each other; the host then ends the stopped rows on the device.

    Args:
      compiling: compiles what is not compiled yet. The first tokens are yielded before the steps' programs are ready.
      keep: as for `generation.stream`.
    """
    compiling = compiling or Compiling()
    pairs = zip(rows, request.prompts)
    texts = GrowingTexts([StoppingText(tokenizer, o.stop, prompt=p) for o, p in pairs])
    steps_pending = compiling.prompts()
    if request.guides is not None:
        compiling.steps()
    start, compiled = time.perf_counter(), compiling.seconds
    prefilled: float | None = None

    def results(end: float) -> list[Result]:
        middle = prefilled or end
        waited = compiling.seconds - compiled  # for the steps' programs
        seconds = (middle - start, end - middle - waited, compiling.seconds)
        batch = results_of(tokenizer, rows, request, progress, seconds)
        for result, text in zip(batch, texts.rows):
            if text.stopped:
                result.cut(text.tokens_used, text.text)
        return batch

    reported: set[int] = set()
    begun = begin(engine, variables, request)
    if request.guides is None:
        if steps_pending:
            progress = generation.copied_progress(engine.depth_only, begun[0])
            pieces = texts.take(progress)
            prefilled = time.perf_counter()
            yield pieces, None
            compiling.steps()
        chunks = generation.stream(engine, variables, request, *begun, keep)
    else:
        from medusa_jax.decoding import constrained  # here: few requests have constraints

        chunks = constrained.stream(engine, variables, request, *begun, keep)
    progress = next(chunks)
    while True:
        pieces = texts.take(progress)
        if watch:
            watch(np.asarray(progress.n_new_B))
        prefilled = prefilled or time.perf_counter()
        if ended and (row_ids := set(np.flatnonzero(texts.ended_B).tolist()) - reported):
            reported |= row_ids
            batch = results(time.perf_counter())
            for row in sorted(row_ids):
                ended(row, batch[row])
        yield pieces, None
        if texts.ended_B.all():
            break
        progress = chunks.send(texts.stopped_B)
    yield [], results(time.perf_counter())


class TextStream(Iterator[str]):
    """The text of one prompt as it grows: iterate for new text.

    Attributes:
      pieces: the text so far, with the tree depths that it was accepted at.
    """

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self.pieces: list[Piece] = []
        self._chunks = chunks
        self._results: list[Result] = []
        self._error: Exception | None = None

    def __repr__(self) -> str:
        return f"<TextStream: {sum(len(p.text) for p in self.pieces)} characters so far>"

    def __next__(self) -> str:
        try:
            for pieces, results in self._chunks:
                self.pieces += pieces
                self._results = results or []
                if pieces:
                    return "".join(piece.text for piece in pieces)
        except Exception as error:
            self._error = error
            raise
        raise StopIteration

    @property
    def result(self) -> Result:
        """The whole answer; decodes the rest of the text first."""
        for _ in self:
            pass
        if self._error:
            raise self._error
        return self._results[0]
