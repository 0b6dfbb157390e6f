"""Decode prompts that extend one text on one cache, such as the turns of a conversation."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from medusa_jax.api.model import Model
from medusa_jax.api.results import Options
from medusa_jax.api.text_stream import Chunk, stream_rows
from medusa_jax.decoding import generation, prefill, rows
from medusa_jax.decoding.request import DecodeRequest, power_of_two, prompt_arrays
from medusa_jax.decoding.state import DecodeState, Engine
from medusa_jax.sharding import Params

# Slots of the first cache, at least `LARGE`; each size is a further program to compile.
LEAST_SLOTS = 1024
# Prompt tokens per piece: up to four small pieces instead of a half-empty large one.
SMALL, LARGE = 64, prefill.PIECE


class Dialogue:
    """Decodes prompts that begin with the last text; reads only the tokens after it.

    Attributes:
      reused: tokens of the last prompt that the cache already had.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.reused = 0
        self._row: DecodeState | None = None
        self._prompt: Sequence[int] = ()
        self._row_key: tuple[Engine, rows.Sizes] | None = None

    def stream(
        self, prompt: Sequence[int], options: Options, **ways: Any
    ) -> Iterator[Chunk]:
        """Stream like `Model.stream([prompt], options, **ways)`; the caller may stop early."""
        opts, engine, request = self.model.plan([prompt], options, **ways)
        variables = self.model.variables_by(engine.acceptance)
        parts = self.model.tokenizer, opts, engine, variables, request
        yield from stream_rows(*parts, begin=self._begin, keep=self._keep)

    def _keep(self, row: DecodeState) -> None:
        self._row = row

    def _begin(
        self, engine: Engine, variables: Params, request: DecodeRequest
    ) -> tuple[DecodeState, list[int]]:
        """Read a prompt from where it differs from the last text; returns the state and cache size."""
        _, prompts = prompt_arrays(engine, request)
        sizes = rows.Sizes(prompts.output_BO.shape[1], prompts.options.end_BQ.shape[1])
        n, reader = len(request.prompts[0]), engine.depth_only
        length = n + int(prompts.options.limit_B[0]) + engine.free_slots
        slots = power_of_two(length, LEAST_SLOTS)
        prompt = np.array([*request.prompts[0]], np.int32)
        row = self._row if self._row_key == (engine, sizes) else None
        # Drafters pair a position with the token after it, so the last shared token is read again.
        at = self.reused = max(0, self._n_shared(row, prompt) - 1)
        if row:  # `begin_row` sets these anew, and an idle row, for `with_slots`, has none
            sampling = row.sampling.replace(penalties=None, first_BW=None)
            row = row.replace(gate=None, host_1=None, sampling=sampling)
        if row is None or not at:
            row = rows.idle(reader, sizes, 1, slots)
        elif row.cache.slots < slots:
            row = rows.with_slots(reader, sizes, slots, row)
        slots = row.cache.slots
        row = rows.begin_row(reader, row, prompts.options)
        while at < n:
            T = SMALL if n - at <= 4 * SMALL else LARGE
            begin = min(at, slots - T)
            piece = prefill.PromptPiece.of(prompt, begin, T)
            row = rows.read_row(reader, variables, row, piece)
            at = begin + T
        self._row_key, self._prompt = (engine, sizes), request.prompts[0]
        return generation.with_request(engine, row, request), [slots]

    def _n_shared(self, row: DecodeState | None, prompt: np.ndarray) -> int:
        """Number of the prompt's first tokens that the row's caches hold, the drafter's included."""
        arrays = jax.tree.leaves(row and (row.length_B, row.cache))
        # An interrupted or failed step may have consumed them.
        if row is None or any(x.is_deleted() for x in arrays):
            return 0
        new_ids = np.asarray(row.tokens_BO)[0, : int(row.n_new_B[0])]
        text = np.concatenate([self._prompt, new_ids])[: int(row.length_B[0])]
        return shared_start(text, prompt)


def shared_start(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of tokens that two texts share at their start."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n
