"""The device's side of serving: one batch of rows, and the programs that run on it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from medusa_jax.api import Model
from medusa_jax.decoding import rows
from medusa_jax.decoding.acceptance import RULES
from medusa_jax.decoding.generate import (
    FOREVER,
    MIN_PROMPT,
    MIN_SLOTS,
    output_slots,
    power_of_two,
)
from medusa_jax.decoding.generate import Request as Row
from medusa_jax.decoding.prefill import Piece
from medusa_jax.decoding.sampling import Sampling, row_keys
from medusa_jax.decoding.state import DecodeState, Progress, progress_of
from medusa_jax.decoding.step import decode_loop
from medusa_jax.decoding.stopping import STOPPED, pack_stops
from medusa_jax.heads import no_drafter
from medusa_jax.serving.job import STOPS
from medusa_jax.tree import Tree, stand_in

# Most alternatives of a token whose log-probabilities a request may ask for.
MOST_BEST = 20


@dataclass
class Reading:
    """A prompt that is being read into a state of one row.

    Attributes:
      row: that state.
      prompt: all tokens; [0, position) are in its cache.
      rule: the acceptance rule, which draws the first token.
    """

    row: DecodeState
    prompt: np.ndarray
    position: int
    rule: str

    @property
    def done(self) -> bool:
        return self.position == len(self.prompt)


class Batch:
    """Rows that take their steps together. It knows no requests, only rows by their numbers.

    Attributes:
      rows, slots: how many there are now; each pair has programs of its own.
      trees: for each number of rows the tree that pays most.
      widest: most nodes of a tree, which a row needs room for behind its text.
      longest: most tokens that a step appends.
    """

    def __init__(self, model: Model, trees: Mapping[int, Tree], most_new: int, piece: int):
        deepest = max(trees.values(), key=lambda tree: tree.drafted.depth)
        engine = model.engine(deepest, "sampled", sampled=True)
        # Knows the depth alone, as `Engine.depth_only`: what is not a step is one program for all.
        self._engine = replace(engine, tree=stand_in(trees.values()))
        self._variables_by = model.variables_by
        # For each row whether its drafter took the text in by heads of a rule that depends on them.
        self._by_drafts = [False] * max(trees)
        self._piece = piece
        self.trees = dict(trees)
        beside = self._engine.n_rows - self._engine.tree.n_nodes
        self.widest = max(tree.n_nodes for tree in trees.values()) + beside
        self.longest = self._engine.tree.path_length
        self._sizes = rows.Sizes(output_slots(self._engine, most_new), STOPS)
        self.rows, self.slots = min(trees), MIN_SLOTS
        self._state = rows.idle(self._engine, self._sizes, self.rows, self.slots)

    def slots_for(self, length: int) -> int:
        """Slots that a step needs behind a text of this length."""
        return power_of_two(length + self.widest, MIN_SLOTS)

    def fit(self, n_rows: int, slots: int) -> None:
        """Go on with so many rows and slots; what lies behind them is gone."""
        if (n_rows, slots) != (self.rows, self.slots):
            self._resize(n_rows, slots)

    def _resize(self, n_rows: int, slots: int) -> None:
        self._state = rows.resized(self._engine, self._sizes, n_rows, slots, self._state)
        self.rows, self.slots = n_rows, slots

    def keep_logprobs(self, wanted: bool) -> None:
        """Keep log-probabilities of what is emitted from now on, or none; while none is read."""
        n = min(MOST_BEST, self._engine.llama.config.vocab_size) if wanted else None
        if self._engine.logprobs != n:
            self._engine = replace(self._engine, logprobs=n)
            self._state = rows.with_logprobs(self._engine, self._state)

    def begin(self, request: Row, source: int, shared: int, rule: str) -> Reading:
        """Begin to read a prompt behind the first `shared` tokens, which row `source` holds."""

        def own(values: Sequence[float] | None, dtype: type) -> Any:
            return np.array(values, dtype)

        sampling = Sampling(
            temperature_B=own(request.temperature, np.float32),
            top_k_B=own(request.top_k, np.int32),
            top_p_B=own(request.top_p, np.float32),
            min_p_B=own(request.min_p, np.float32),
            key_B=row_keys(own(request.seed, np.uint32), own(request.ids, np.int32)),
            epsilon_B=own(request.epsilon, np.float32),
            delta_B=own(request.delta, np.float32),
        )
        row = rows.begin_row(
            self._engine,
            self._state,
            np.int32(source),
            sampling,
            own(request.limits, np.int32),
            own(request.max_steps or [FOREVER], np.int32),
            pack_stops(request.stops or [()], STOPS),
        )
        # Drafters pair a position with the token behind it, so the last shared one is read again.
        position, n = max(0, shared - 1), len(request.prompts[0])
        if self._tokens_read(n - position) == self._tokens_read(n):
            position = 0  # nothing is saved, and other pieces would round differently
        # A row of temperature 0 is greedy under "sampled", too.
        rule = "sampled" if rule in ("auto", "greedy") else rule
        if self._by_drafts[source] != RULES[rule].by_drafts:
            position = 0  # its drafter's state is of other heads (`Model.variables_by`)
        return Reading(row, np.array(request.prompts[0], np.int32), position, rule)

    def _tokens_read(self, n: int) -> int:
        """What reading n tokens takes: whole pieces, and a last one of a size that is compiled."""
        whole, rest = divmod(n, self._piece)
        return whole * self._piece + (power_of_two(rest, MIN_PROMPT) if rest else 0)

    def next_tokens(self, reading: Reading) -> int:
        """Tokens of the next piece, padding included."""
        rest = len(reading.prompt) - reading.position
        return min(power_of_two(rest, MIN_PROMPT), self._piece)

    def read(self, reading: Reading) -> None:
        """Read the next piece, behind which the first token is known if it was the last."""
        n, T = len(reading.prompt), self.next_tokens(reading)
        if reading.row.cache.slots != self.slots:
            reading.row = rows.resized(
                self._engine, self._sizes, 1, self.slots, reading.row
            )
        begin = min(reading.position, self.slots - T)
        tokens: Any = np.zeros(T + 1, np.int32)
        here = reading.prompt[begin : begin + T + 1]
        tokens[: len(here)] = here
        one: Any = np.array([begin], np.int32), np.array([n], np.int32)
        piece = Piece(tokens[None, :-1], tokens[None, 1:], *one)
        engine = replace(self._engine, acceptance=reading.rule)
        variables = self._variables_by(reading.rule)
        reading.row = rows.read_row(engine, variables, reading.row, piece)
        reading.position = min(begin + T, n)

    def insert(self, reading: Reading, at: int) -> Progress:
        """Put a row that has been read in the place of another; what there is of it so far."""
        self._state = rows.insert_row(self._engine, self._state, reading.row, np.int32(at))
        self._by_drafts[at] = RULES[reading.rule].by_drafts
        return progress_of(reading.row)

    def run(
        self, wanted_B: np.ndarray, drafts: bool, rule: str, steps: int, few: int
    ) -> tuple[Progress, int]:
        """Steps of the rows that should be RUNNING, until one of them ends; does not wait for it.

        Args:
          steps: at most.
          few: at most, if one of them has ended already: then its place may soon be wanted.
          drafts: False decodes plainly and leaves the drafter's state behind: a row that has
            gone on so cannot draft again.

        Returns: what there is then, and how many nodes the tree had.
        """
        tree, drafter = self.trees[self.rows], self._engine.drafter
        if not drafts:
            tree, drafter = Tree.none(), no_drafter(self._engine.llama.config)
        engine = replace(self._engine, tree=tree, drafter=drafter, acceptance=rule)
        status_B, max_steps = rows.run_only(
            self._engine, self._state.status_B, wanted_B, np.int32(steps), np.int32(few)
        )
        self._state, progress = decode_loop(
            engine,
            self._variables_by(rule),
            self._state.replace(status_B=status_B),
            max_steps,
            True,
        )
        return progress, tree.n_nodes

    def warm_up(
        self, most_tokens: int, groups: Sequence[tuple[bool, str]]
    ) -> Iterator[None]:
        """Compile what texts of up to so many tokens need, one number of rows and slots at a time.

        Whatever the rows hold is gone each time.

        Args:
          groups: of which requests, as `Job.group` has it.
        """
        slots = MIN_SLOTS
        while True:
            for n_rows in self.trees:
                # A program is another one for what came out of another program, so each runs
                # behind every one that it may follow.
                self._resize(n_rows, slots)
                reading = self._warm_reading(most_tokens)
                for drafts, rule in groups:
                    for one in ("greedy", "sampled") if rule == "auto" else (rule,):
                        self.insert(reading, 0)
                        self._run_nothing(drafts, one)
                        self._run_nothing(drafts, one)
                self._warm_reading(most_tokens)
                jax.block_until_ready(self._state)
                yield
            if slots >= self.slots_for(most_tokens):
                break
            slots *= 2
        self._resize(min(self.trees), MIN_SLOTS)
        yield  # what was answered since the last part is gone, too

    def _run_nothing(self, drafts: bool, rule: str) -> None:
        self.run(np.full(self.rows, STOPPED, np.int32), drafts, rule, 0, 0)

    def _warm_reading(self, most_tokens: int) -> Reading:
        """Read prompts of all sizes; the last of them."""
        one = Row([[0]], [1], [()], [0.0], [0], [1.0], [0.0], [0], [0], [0.1], [0.1])
        T = min(self._piece, self.slots, power_of_two(most_tokens, MIN_PROMPT))
        while True:
            reading = self.begin(one, 0, 0, "auto")
            reading.prompt = np.zeros(T, np.int32)
            self.read(reading)
            self.insert(reading, 0)
            if T == MIN_PROMPT:
                return reading
            T //= 2
