"""A request in flight, as the host knows it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import numpy as np

from medusa_jax.api import Model, Options, StoppingText
from medusa_jax.api.results import logprobs_of_row, results_of
from medusa_jax.constraints.guide import Guide
from medusa_jax.decoding.acceptance import RULES
from medusa_jax.decoding.penalties import any_penalties
from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.decoding.state import Progress
from medusa_jax.decoding.stopping import PAUSED, RUNNING
from medusa_jax.errors import between
from medusa_jax.serving.lines import LineText
from medusa_jax.serving.request import (
    MOST_BEST,
    Deliver,
    Delta,
    Ending,
    Handle,
    Request,
    TooLong,
)
from medusa_jax.text.tokenizer import Tokenizer
from medusa_jax.tree.tree import Tree
from medusa_jax.typed import read

# Most EOS ids of a row in a compiled program.
MOST_ENDS = 8


class Group(NamedTuple):
    """Properties that rows must share to take a step together.

    Attributes:
      drafts: whether they draft.
      rule: the acceptance rule; "auto" is greedy or sampled, row by row.
      logprobs: whether log-probabilities are kept.
      penalties: whether they have biases or penalties.
      constrained: whether they have constraints, so that the host takes part in every step.
      predicted: whether they have tokens to copy drafts from (`Request.predicted`).
    """

    drafts: bool = True
    rule: str = "auto"
    logprobs: bool = False
    penalties: bool = False
    constrained: bool = False
    predicted: bool = False

    @property
    def by_drafts(self) -> bool:
        """Whether the rule reads drafts."""
        return self.rule != "auto" and RULES[self.rule].by_drafts

    def __str__(self) -> str:
        names = {
            "drafts" if self.drafts else "no drafts": True,
            "logprobs": self.logprobs,
            "penalties": self.penalties,
            "constraints": self.constrained,
            "a prediction": self.predicted,
            self.rule: self.rule != "auto",
        }
        return ", ".join(name for name, is_set in names.items() if is_set)


# The most common group; its requests never wait for a program that only another group needs.
BASE = Group()
# Groups to compile programs for ahead of any request, the likeliest first. The page decodes without drafts for its
# comparison.
LIKELY = (
    BASE,
    Group(drafts=False),
    Group(constrained=True),
    Group(logprobs=True),
    Group(penalties=True),
)


@dataclass(eq=False)
class Job:
    """A request from `submit` to its end.

    Attributes:
      decode: the request in the decode loop's form, B = 1.
      token_ids: emitted tokens, as far as the host has read.
      length: text positions in the cache, likewise.
      steps_seen: decode steps, likewise.
      delivered_at: when its last part was delivered.
      row: number of its row in the batch, which `Jobs` sets; None until its prompt has been read.
      reused: as `Ending.reused_tokens`.
      depth: of the deepest tree of its steps.
      drafted: tokens that the drafter has read: of the prompt, or, with a gap, of the text before the gap.
      has_gap: whether steps without drafts have left a gap in the drafter's state.
      drafts: as in `Ending`.
      histogram_L: steps that appended 1, 2, ... tokens, as far as the host has read.
      counts_3L: by depth, the drafts that were accepted, tested, and expected to be accepted (`Ladder.count`).
    """

    request: Request
    decode: DecodeRequest
    text: StoppingText
    tokenizer: Tokenizer
    handle: Handle
    deliver: Deliver
    token_ids: list[int] = field(default_factory=list)
    length: int = 0
    steps_seen: int = 0
    delivered_at: float = 0.0
    row: int | None = None
    reused: int = 0
    drafted: int = 0
    has_gap: bool = False
    drafts: list[int] = field(default_factory=list)
    histogram_L: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int32))
    counts_3L: np.ndarray | None = None
    depth: int = 0
    submitted_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0
    first_at: float = 0.0

    @property
    def prompt(self) -> Sequence[int]:
        return self.decode.prompts[0]

    @property
    def options(self) -> Options:
        return self.request.options

    @property
    def guide(self) -> Guide | None:
        """The guide of its constraint."""
        return self.decode.guides[0] if self.decode.guides else None

    @property
    def group(self) -> Group:
        """Rows of one group can take a step together."""
        rule = self.request.acceptance
        rule = "auto" if rule in ("greedy", "sampled") else rule
        group = Group(
            self.request.drafts,
            rule,
            logprobs=self.options.logprobs is not None,
            penalties=any_penalties(self.decode.penalties),
            constrained=self.decode.guides is not None,
        )
        can_copy = group.drafts and not group.by_drafts
        return group._replace(predicted=can_copy and bool(self.request.predicted))

    def begin(self, reused: int, drafted: int) -> None:
        """Record that reading its prompt begins.

        Args:
          drafted: tokens that the drafter has read in the row that the prompt starts from.
        """
        self.started_at = time.perf_counter()
        self.reused = reused
        # Tokens that the drafter reads after a gap do not count.
        self.drafted = drafted if drafted < reused else len(self.prompt)

    def cached(self, limit: int) -> tuple[np.ndarray, int]:
        """Return up to `limit` cached tokens (all except the root), and the number the drafter has read."""
        text: np.ndarray = np.array([*self.prompt, *self.token_ids[:-1]], np.int32)
        is_whole = self.request.drafts and not (self.has_gap or self.guide)
        return text[:limit], len(text) if is_whole else self.drafted

    def note_gap(self, is_plain: bool) -> None:
        """Record that the drafter misses the text from here on, if a request with drafts takes plain steps."""
        if is_plain and self.request.drafts and not self.has_gap:
            self.drafted, self.has_gap = self.length, True

    def see(self, progress: Progress, row: int, tree: Tree | None) -> np.ndarray:
        """Record steps with a tree (None: no steps); returns how many appended 1, 2, ... tokens."""
        before, self.steps_seen = self.steps_seen, int(progress.steps_B[row])
        if tree is not None:
            self.drafts += (self.steps_seen - before) * [tree.n_nodes - 1]
            self.depth = max(self.depth, tree.depth)
        self.length = int(progress.length_B[row])
        new_L = np.asarray(progress.histogram_BL[row]) - self.histogram_L
        self.histogram_L = self.histogram_L + new_L
        return new_L

    def take(self, progress: Progress, row: int) -> Delta:
        """Return the new part of its answer, up to a stop string.

        Args:
          progress: numpy arrays.
          row: its row in `progress`.
        """
        self.first_at = self.first_at or time.perf_counter()
        progress = jax.tree.map(lambda x: x[row : row + 1], progress)
        begin, count = len(self.token_ids), int(progress.n_new_B[0])
        is_last = int(progress.status_B[0]) not in (RUNNING, PAUSED)
        tokens, depths = (
            x[0, begin:count].tolist() for x in (progress.tokens_BO, progress.depth_BO)
        )
        parts = self.text.take(tokens, depths, is_last)
        end = self.text.tokens_used
        self.token_ids += tokens[: end - begin]
        new = logprobs_of_row(progress, 0, slice(begin, end), self.options.logprobs)
        return Delta(
            parts=parts,
            token_ids=self.token_ids[begin:],
            logprobs=new.get("logprobs", []),
            top_logprobs=new.get("top_logprobs", []),
            ending=self._ending(progress) if is_last or self.text.stopped else None,
        )

    def _ending(self, progress: Progress) -> Ending:
        seconds = self.first_at - self.started_at, time.perf_counter() - self.first_at, 0.0
        parts = self.tokenizer, [self.options], self.decode, progress, seconds
        [result] = results_of(*parts)
        del result.acceptance_histogram[self.depth + 1 :]
        if self.text.stopped:
            result.cut(len(self.token_ids), self.text.text)
            result.finish_reason = self.text.stop_reason
        queue_seconds = self.started_at - self.submitted_at
        return Ending(result, queue_seconds, self.reused, self.drafts)


def make_job(
    model: Model,
    request: Request,
    most_prompt: int,
    most_new: int,
    handle: Handle,
    deliver: Deliver,
) -> Job:
    """Check a request and make its job.

    Args:
      most_prompt, most_new: most tokens of a prompt and of an answer.

    Raises:
      UserError: the model cannot answer it.
    """
    request = read("a request", request, Request)
    options = request.options
    options = replace(options, max_new_tokens=min(options.max_new_tokens, most_new))
    request = replace(request, options=options)
    model.engine(acceptance=request.acceptance, sampled=options.temperature > 0)
    prompt = model.encode(request.prompt)
    if len(prompt) > most_prompt:
        raise TooLong(
            f"the prompt has {len(prompt)} tokens, this server takes {most_prompt}: shorten it"
        )
    decode = model.request([prompt], [options], [request.id])
    for name, ids in {"predicted": request.predicted, "stop_ids": request.stop_ids}.items():
        between(name, max(ids, default=0), 0, model.config.vocab_size - 1)
    decode.predicted = [request.predicted]
    ends = decode.ends[0] if decode.ends else ()
    between("EOS ids of a served request", len(ends), 0, MOST_ENDS)
    between("logprobs of a served request", options.logprobs or 0, 0, MOST_BEST)
    if request.min_tokens:
        [penalties] = decode.penalties or [options.penalties]
        asked = replace(
            penalties, least=request.min_tokens, ends=(*ends, *request.stop_ids)
        )
        decode.penalties = [asked]
    rules = model.tokenizer, options.stop, request.stop_ids, request.min_tokens, prompt
    text = LineText(request.lines, *rules) if request.lines else StoppingText(*rules)
    return Job(request, decode, text, model.tokenizer, handle, deliver)
