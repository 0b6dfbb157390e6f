"""What `serving/batch.py` is for the scheduler, without a device: it remembers what every slot of every
row holds and complains where a text is taken for granted that is not there."""

from dataclasses import dataclass, field, replace

import numpy as np

from medusa_jax.decoding.generate import power_of_two
from medusa_jax.decoding.state import Progress
from medusa_jax.decoding.stopping import LIMIT, PAUSED, RUNNING, STOPPED
from medusa_jax.serving.batch import Reading
from medusa_jax.serving.job import Group

RUBBISH = -1


class InPlace:
    """Programs that are compiled where they are first needed."""

    def ready(self, programs):
        return True

    known = ready


# As few as the tests' texts fill.
LEAST_SLOTS = 32


def next_token(text):
    """What comes after a text: any rule will do that looks at all of it."""
    return 1 + (sum(text) * 7 + len(text) * 3) % 50


def solo(prompt, limit):
    """The answer to a prompt without any other."""
    text = list(prompt)
    for _ in range(limit):
        text.append(next_token(text))
    return text[len(prompt) :]


@dataclass
class Row:
    """A row of the state.

    Attributes:
      cache, drafter: the token that each slot was computed from, or RUBBISH.
      text: prompt and answer; the last token is the root, which is in no slot yet.
      prompt: how many of them are the prompt's.
      group: that of its request.
    """

    cache: np.ndarray
    drafter: np.ndarray
    text: list = field(default_factory=list)
    prompt: int = 0
    limit: int = 0
    group: Group | None = None
    status: int = STOPPED
    depths: list = field(default_factory=list)
    steps: int = 0

    @property
    def length(self):
        return max(0, len(self.text) - 1)

    @property
    def new(self):
        return len(self.text) - self.prompt

    def resize(self, slots):
        self.cache, self.drafter = (
            np.append(old, [RUBBISH] * slots)[:slots] for old in (self.cache, self.drafter)
        )


def write(slots, at, tokens, width):
    """Tokens and rubbish, so wide together; as `lax.dynamic_update_slice` moves what does not fit."""
    at = min(at, len(slots) - width)
    slots[at : at + width] = [*tokens, *[RUBBISH] * (width - len(tokens))]


class FakeBatch:
    """As `Batch`.

    Attributes:
      runs: what was asked for: with how many rows, and whether with drafts.
      steps: for each step that was taken, how many rows it was of use to.
      tokens_read: of prompts, padding included.
    """

    def __init__(self, model, trees, most_new, piece):
        self.trees, self.piece = dict(trees), piece
        self.widest = max(tree.n_nodes for tree in trees.values())
        self.longest = max(tree.path_length for tree in trees.values())
        self.runs, self.steps, self.tokens_read = [], [], 0
        self.restart()

    def restart(self):
        self.rows, self.slots = min(self.trees), LEAST_SLOTS
        self.state = [self.idle() for _ in range(self.rows)]

    def idle(self):
        return Row(*(np.full(self.slots, RUBBISH) for _ in range(2)))

    def slots_for(self, length):
        return power_of_two(length + self.widest, LEAST_SLOTS)

    def fit(self, n_rows, slots):
        assert all(row.status != RUNNING for row in self.state[n_rows:])
        self.rows, self.slots = n_rows, slots
        more = [self.idle() for _ in range(n_rows - len(self.state))]
        self.state = self.state[:n_rows] + more
        for row in self.state:
            row.resize(slots)

    def take(self, at, group):
        row = self.state[at]
        taken = Reading(replace(row, cache=row.cache.copy()), np.array([], int), 0, group)
        taken.row.drafter = row.drafter.copy()
        taken.row.text, taken.row.depths = list(row.text), list(row.depths)
        return taken

    def begin(self, request, source, shared, group):
        [prompt], [limit] = request.prompts, request.limits
        row = self.state[source]
        position = max(0, shared - 1)
        assert list(row.cache[:position]) == list(prompt[:position])
        slots = row.cache.copy(), row.drafter.copy()
        begun = Row(*slots, list(prompt), len(prompt), limit, group)
        return Reading(begun, np.array(prompt), position, group)

    def next_tokens(self, reading):
        return min(power_of_two(len(reading.prompt) - reading.position, 4), self.piece)

    def read(self, reading):
        T, row, n = self.next_tokens(reading), reading.row, len(reading.prompt)
        row.resize(self.slots)
        at = min(reading.position, self.slots - T)
        for slots in (row.cache, row.drafter):
            write(slots, at, reading.prompt[at : at + T], T)
        reading.position = min(at + T, n)
        self.tokens_read += T

    def insert(self, reading, at):
        row = reading.row
        assert reading.done
        row.resize(self.slots)
        if not row.depths:
            row.text.append(next_token(row.text))
            row.depths.append(0)
            row.status = LIMIT if row.limit == 1 else RUNNING
        self.state[at] = row
        return self.progress([row])

    def run(self, wanted_B, group, steps, few, guides=()):
        assert len(wanted_B) == self.rows
        drafts = group.drafts
        M = self.trees[self.rows].n_nodes if drafts else 1
        most = self.trees[self.rows].path_length if drafts else 1
        alive = (RUNNING, PAUSED)
        asked = [row for row, wanted in zip(self.state, wanted_B) if wanted == RUNNING]
        assert all(row.group == group for row in asked)
        steps = steps if all(row.status in alive for row in asked) else few
        for row, wanted in zip(self.state, wanted_B):
            row.status = int(wanted) if row.status in alive else row.status
        for row in self.state:
            if row.status == RUNNING:
                held = row.text[: row.length]
                assert list(row.cache[: row.length]) == held
                assert not drafts or list(row.drafter[: row.length]) == held
        began = [row for row in self.state if row.status == RUNNING]
        for _ in range(steps if began else 0):
            if max(r.length for r in self.state if r.status in alive) + M > self.slots:
                break
            self.steps.append(sum(row.status == RUNNING for row in self.state))
            for row in self.state:
                self._step(row, M, most, drafts)
            if any(row.status != RUNNING for row in began):
                break
        self.runs.append((self.rows, drafts))
        return self.progress(self.state), M

    def _step(self, row, M, most, drafts):
        running = row.status == RUNNING
        n = min(1 + sum(row.text) % most, row.limit - row.new) if running else 0
        at = row.length
        row.steps += running
        for _ in range(n):
            row.text.append(next_token(row.text))
        new = row.text[at : row.length]
        row.depths += [*range(1, n), 0] if n else []
        write(row.cache, at, new, M)
        if drafts:
            write(row.drafter, at, new, most)
        if running and row.new == row.limit:
            row.status = LIMIT

    def progress(self, rows):
        n_new = [row.new for row in rows]
        tokens = np.zeros((len(rows), 400), int)
        depths = np.zeros((len(rows), 400), int)
        for b, row in enumerate(rows):
            tokens[b, : n_new[b]] = row.text[row.prompt :]
            depths[b, : len(row.depths)] = row.depths
        return Progress(
            tokens_BO=tokens,
            depth_BO=depths,
            n_new_B=np.array(n_new),
            length_B=np.array([row.length for row in rows]),
            status_B=np.array([row.status for row in rows]),
            steps_B=np.array([row.steps for row in rows]),
            histogram_BL=np.zeros((len(rows), 1), int),
            logprobs=None,
        )
