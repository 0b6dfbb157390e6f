"""The device's side of serving: one batch of rows, and the programs that run on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from medusa_jax.constraints.guide import Guide
from medusa_jax.constraints.host_work import FillWorks, fill_all
from medusa_jax.decoding import constrained, rows
from medusa_jax.decoding.loop import decode_loop
from medusa_jax.decoding.penalties import PenaltyOptions
from medusa_jax.decoding.prefill import PromptPiece
from medusa_jax.decoding.request import (
    MIN_PROMPT,
    DecodeRequest,
    output_slots,
    power_of_two,
    row_options,
)
from medusa_jax.decoding.state import PREDICTED, DecodeState, Engine, Progress, progress_of
from medusa_jax.decoding.stopping import PAUSED, RUNNING, STOPPED
from medusa_jax.decoding.token_sets import NO_TOKEN
from medusa_jax.serving.engines import Engines
from medusa_jax.serving.extras import BatchExtras, parts_of
from medusa_jax.serving.job import MOST_ENDS, Group
from medusa_jax.sharding import placed
from medusa_jax.tree.tree import Tree

# Slots of the smallest cache. Every size is compiled separately, and native attention skips unused slots;
# 512 slots take 24 MB per row with 30 layers and 3 heads.
LEAST_SLOTS = 512
# Steps of a chunk before the time of a step is known, and most steps if one of its rows had already ended.
FEW_STEPS = 2


@dataclass
class Reading:
    """A state of one row outside the batch: a prompt that is being read, or a parked text.

    Attributes:
      row: the state.
      prompt: its first `position` tokens are in the cache; empty for a parked row.
      group: the request's group; its rule draws the first token.
    """

    row: DecodeState
    prompt: np.ndarray
    position: int
    group: Group

    @property
    def done(self) -> bool:
        return self.position == len(self.prompt)


def piece_sizes(limit: int) -> list[int]:
    """Return the sizes of the pieces that prompts are read in: 16, 128, ... and `limit` tokens."""
    sizes = [MIN_PROMPT]
    while 8 * sizes[-1] < limit:
        sizes.append(8 * sizes[-1])
    return [*sizes, limit] if limit > MIN_PROMPT else [limit]


class Batch:
    """Rows that take their steps together, identified by their numbers.

    Args:
      most_new: most tokens of an answer.
      piece: most tokens of a piece of a prompt, a power of two.

    Attributes:
      engines: of the groups of rows.
      rows, slots: current size; each pair has its own programs.
      pieces: sizes of the pieces that prompts are read in, ascending.
    """

    _state: DecodeState

    def __init__(self, engines: Engines, most_new: int, piece: int) -> None:
        self.engines, self._engine = engines, engines.common
        self._variables_by = engines.model.variables_by
        # By row: whether its drafter's state is of the heads for rules that read drafts (`Model.variables_by`); others
        # cannot reuse it.
        self._by_drafts = [False] * max(engines.trees)
        self.pieces = piece_sizes(piece)
        self._sizes = rows.Sizes(output_slots(self._engine, most_new), MOST_ENDS)
        self.restart()

    def restart(self) -> None:
        """Reset every row to idle."""
        self._reset(min(self.engines.trees), LEAST_SLOTS)

    def _reset(self, n_rows: int, slots: int) -> None:
        """Start with idle rows, placed like programs' results; otherwise JAX would recompile."""
        if hasattr(self, "_state"):
            del self._state  # frees its memory before the next is allocated
        self.rows, self.slots = n_rows, slots
        self._extras = BatchExtras(self.engines.with_logprobs, n_rows, self._sizes.outputs)
        idle = rows.idle(self._engine, self._sizes, n_rows, slots)
        self._state = placed(self._engine.llama.mesh, idle)

    def slots_for(self, length: int) -> int:
        """Return the slots that a step needs for a text of this length."""
        return power_of_two(length + self.engines.widest, LEAST_SLOTS)

    def resize(self, n_rows: int, slots: int) -> None:
        """Change the number of rows and slots; rows beyond the new number are lost.

        Rows are moved one by one, so that programs are needed per size, not per pair of sizes.
        """
        if (n_rows, slots) == (self.rows, self.slots):
            return
        states = [self._row(i) for i in range(min(n_rows, self.rows))]
        self._reset(n_rows, slots)
        for i, row in enumerate(states):
            self._put(self._resized(row, slots), i)

    def _row(self, at: int) -> DecodeState:
        row = rows.take_row(self._engine, self._state, np.int32(at))
        return rows.with_extras(row, self._extras.row(at))

    def _put(self, row: DecodeState, at: int) -> None:
        row, extras = rows.split_extras(row)
        self._state = rows.insert_row(self._engine, self._state, row, np.int32(at))
        self._extras.put(extras, at)

    def _resized(self, row: DecodeState, slots: int) -> DecodeState:
        """Change a row's number of slots, one power of two at a time."""
        row, extras = rows.split_extras(row)
        while row.cache.slots != slots:
            old_slots = row.cache.slots
            size = 2 * old_slots if old_slots < slots else old_slots // 2
            row = rows.with_slots(self._engine, self._sizes, size, row)
        return rows.with_extras(row, extras)

    def begin(
        self, request: DecodeRequest, source: int, reused: int, group: Group
    ) -> Reading:
        """Begin to read a prompt after its first `reused` tokens, which row `source` has cached."""
        row = rows.take_row(self._engine, self._state, np.int32(source))
        # Prompts are read with log-probabilities for all, since a second program would cost seconds.
        room = rows.empty_extras(self.engines.with_logprobs, row.tokens_BO)
        predicted_BP = self._predicted(request, group)
        row = row.replace(logprobs=room.logprobs, predicted_BP=predicted_BP)
        options = row_options(request, self._engine.llama.config.vocab_size, MOST_ENDS)
        row = rows.begin_row(self._engine, row, options)
        # Drafters pair a position with the next token, so the last shared token is read again.
        position, n = max(0, reused - 1), len(request.prompts[0])
        if self._tokens_read(n - position) == self._tokens_read(n):
            position = 0  # saves nothing, and other pieces would round differently
        if self._by_drafts[source] != group.by_drafts:
            position = 0  # other heads computed its drafter's state (`Model.variables_by`)
        return Reading(row, np.array(request.prompts[0], np.int32), position, group)

    def _predicted(self, request: DecodeRequest, group: Group) -> np.ndarray | None:
        if self._state.predicted_BP is None:
            return None
        asked = request.predicted if group.predicted else None
        tokens: Sequence[int] = asked[0] if asked else ()
        predicted_BP = np.full((1, PREDICTED), NO_TOKEN, np.int32)
        predicted_BP[0, : len(tokens)] = tokens[:PREDICTED]
        return predicted_BP

    def _piece(self, n: int) -> int:
        """Return the size of the next piece: up to four small ones instead of a half-empty large one."""
        return next((size for size in self.pieces if 4 * size >= n), self.pieces[-1])

    def _tokens_read(self, n: int) -> int:
        """Return the number of tokens computed to read n tokens, padding included."""
        total = 0
        while total < n:
            total += self._piece(n - total)
        return total

    def next_tokens(self, reading: Reading) -> int:
        """Return the size of the next piece, padding included."""
        return self._piece(len(reading.prompt) - reading.position)

    def read(self, reading: Reading) -> None:
        """Read the next piece; the last one draws the first token."""
        n, T = len(reading.prompt), self.next_tokens(reading)
        row = self._resized(reading.row, self.slots)
        begin = min(reading.position, self.slots - T)
        piece = PromptPiece.of(reading.prompt, begin, T)
        engine = self.engines.of_prompts(reading.group)
        variables = self._variables_by(engine.acceptance)
        reading.row = rows.read_row(engine, variables, row, piece)
        reading.position = min(begin + T, n)

    def insert(self, reading: Reading, at: int) -> Progress:
        """Overwrite row `at` of the batch with a row that was read; return its progress."""
        row, extras = rows.split_extras(self._resized(reading.row, self.slots))
        row = rows.with_extras(row, parts_of(extras, reading.group))
        self._put(row, at)
        self._by_drafts[at] = reading.group.by_drafts
        return progress_of(row)

    def take(self, at: int, group: Group) -> Reading:
        """Take a row out of the batch, to be inserted later."""
        row, extras = rows.split_extras(self._row(at))
        row = rows.with_extras(row, parts_of(extras, group))
        return Reading(row, np.zeros(0, np.int32), 0, group)

    def run(
        self,
        wanted_B: np.ndarray,
        group: Group,
        steps: int,
        guides: Mapping[int, Guide] | None = None,
        fill: FillWorks = fill_all,
        nodes: int | None = None,
    ) -> tuple[Progress, Tree]:
        """Dispatch a chunk of steps, which ends as soon as a row ends.

        Args:
          wanted_B: RUNNING for the rows to step, PAUSED for other texts, else STOPPED.
          group: of these rows. Steps without drafts leave a gap in the drafter's state.
          steps: maximum number of steps; `FEW_STEPS` if one of the rows has already ended, since its row may
            soon be needed.
          guides: by row. A group with constraints takes `FEW_STEPS` steps, or one if other rows wait.
          fill: does the guides' work, by default in this thread.
          nodes: of the tree; by default the tree is that for the number of rows.

        Returns: the progress after the chunk, and the tree of its steps.
        """
        engine, state = self.engines.of_steps(group, self.rows, nodes), self._state
        few_steps = min(FEW_STEPS, steps)
        most = np.int32(steps), np.int32(few_steps)
        status_B, most_steps = rows.run_only(self._engine, state.status_B, wanted_B, *most)
        state = state.replace(status_B=status_B)
        state = rows.with_extras(state, self._extras.of_group(group))
        if group.constrained:
            steps = 1 if (wanted_B == PAUSED).any() else few_steps
            state, progress = self._constrained_steps(engine, state, guides, fill, steps)
        else:
            variables = self._variables_by(engine.acceptance)
            state, progress = decode_loop(engine, variables, state, most_steps, True)
        self._state, extras = rows.split_extras(state)
        self._extras.store(extras)
        return progress, engine.tree

    def _constrained_steps(
        self, engine: Engine, state: DecodeState, guides: Any, fill: FillWorks, steps: int
    ) -> tuple[DecodeState, Progress]:
        """Take steps of rows with constraints until a row ends or lacks room.

        Without guides, runs a step of each size, to compile their programs.
        """
        variables = self._variables_by(engine.acceptance)
        if not guides:
            return constrained.step_sizes(engine, variables, state)
        inputs = constrained.host_inputs(engine, variables, state)
        for n in range(max(1, steps)):
            status_B = np.asarray(inputs.progress.status_B)
            length_B = np.asarray(inputs.progress.length_B)
            alive_B = (status_B == RUNNING) | (status_B == PAUSED)
            longest = length_B[alive_B].max(initial=0)
            ended = any(status_B[row] != RUNNING for row in guides)
            if (n and ended) or longest + engine.free_slots > state.cache.slots:
                break
            state, inputs = constrained.step(engine, variables, state, guides, inputs, fill)
        return state, inputs.progress

    def compile(self, group: Group, n_rows: int, slots: int, nodes: int | None) -> None:
        """Run once all programs that a group needs at this size; the rows' texts are lost."""
        self.restart()
        self.resize(n_rows, slots)
        # The shortest prompts that begin with a piece of each size.
        lengths = [1, *(4 * size + 1 for size in self.pieces[:-1])]
        for length in (n for n in lengths if self.slots_for(n) <= slots):
            reading = self.begin(_placeholder(length, group), 0, 0, group)
            while not reading.done:
                self.read(reading)
            self.insert(reading, 0)
            self.insert(self.take(0, group), 0)
        for _ in range(2):  # the first run's result may be placed differently
            self.run(np.full(n_rows, STOPPED, np.int32), group, 0, nodes=nodes)
        if slots > LEAST_SLOTS:  # grow to this size and back
            row = self._resized(self._row(0), slots // 2)
            self._put(self._resized(row, slots), 0)
        # A row may be moved to a batch of any size.
        self._extras.compile(group, self.engines.trees)
        jax.block_until_ready(self._state)
        self.restart()


def _placeholder(n: int, group: Group) -> DecodeRequest:
    """Return a request of n prompt tokens and one new one."""
    return DecodeRequest(
        prompts=[[0] * n],
        limits=[1],
        penalties=[PenaltyOptions(presence=1.0)] if group.penalties else None,
        guides=[None] if group.constrained else None,
    )
