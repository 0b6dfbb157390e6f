"""A request in flight, as the host knows it."""

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from medusa_jax.api import Model, Options, Result, StoppingText, steps_of
from medusa_jax.api.results import finish_reason, logprobs_of_row
from medusa_jax.constraints.guide import SLOW_MASKS
from medusa_jax.decoding.generate import Request as Row
from medusa_jax.decoding.guides import Guide
from medusa_jax.decoding.penalties import any_asked
from medusa_jax.decoding.state import Progress
from medusa_jax.decoding.stopping import PAUSED, RUNNING, STOPPED
from medusa_jax.errors import UserError
from medusa_jax.serving.request import (
    Deliver,
    Delta,
    Ending,
    Handle,
    Request,
    Stopped,
    TooLong,
)

# Stop sequences of a row and tokens of each that one compiled program has room for.
STOPS = (8, 4)


class Group(NamedTuple):
    """What rows have in common that can take a step together.

    Attributes:
      drafts: whether they draft.
      rule: the acceptance rule; "auto" is greedy or sampled, row by row.
      logprobs: whether log-probabilities are kept.
      penalties: whether rows have biases or penalties.
      constrained: whether they have constraints, for which the host has a part in every step.
    """

    drafts: bool
    rule: str = "auto"
    logprobs: bool = False
    penalties: bool = False
    constrained: bool = False


# The most common kind; these requests never wait for a program that only another one needs.
BASE = Group(drafts=True)


@dataclass
class Job:
    """A request from `submit` to its end.

    Attributes:
      row: the request as the decode loop takes it, B = 1.
      token_ids, depths: emitted so far, as far as the host has looked.
      length: text positions in the cache, likewise.
      steps: decode steps when its tokens were last taken.
      logprobs, top_logprobs: as in `Result`, if asked for.
      seat: the row of the batch that it has, once its prompt is read.
      longest: most tokens that a step can append.
      reused, tree_nodes: as in `Ending`.
      drafted: how many tokens of its prompt the drafter has read.
    """

    request: Request
    row: Row
    text: StoppingText
    handle: Handle
    deliver: Deliver
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    length: int = 0
    steps: int = 0
    seat: int | None = None
    reused: int = 0
    drafted: int = 0
    tree_nodes: int = 1
    longest: int = 1
    submitted_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0
    first_at: float = 0.0

    @property
    def prompt(self) -> Sequence[int]:
        return self.row.prompts[0]

    @property
    def options(self) -> Options:
        return self.request.options

    @property
    def guide(self) -> Guide | None:
        """What knows its constraint."""
        return self.row.guides[0] if self.row.guides else None

    @property
    def group(self) -> Group:
        """Rows of one group can take a step together."""
        rule = self.request.acceptance
        rule = "auto" if rule in ("greedy", "sampled") else rule
        return Group(
            self.request.drafts,
            rule,
            logprobs=self.options.logprobs is not None,
            penalties=any_asked(self.row.penalties),
            constrained=self.row.guides is not None,
        )

    def begin(self) -> None:
        """Its prompt begins to be read."""
        self.started_at = time.perf_counter()

    def known_text(self) -> np.ndarray:
        """What the cache holds of it: all but the last token, which is the root."""
        return np.array([*self.prompt, *self.token_ids[:-1]], np.int32)

    def kept(self, most: int) -> tuple[np.ndarray, int]:
        """That text as far as `most` tokens, and how many of them the drafter has read."""
        text = self.known_text()
        return text[:most], len(text) if self.request.drafts else self.drafted

    def take(self, progress: Progress, row: int) -> Delta:
        """What is new of it in row `row`, as far as it counts: after a stop string nothing does.

        Args:
          progress: numpy arrays.
        """
        self.first_at = self.first_at or time.perf_counter()
        seen, count = len(self.token_ids), int(progress.n_new_B[row])
        ended = int(progress.status_B[row]) not in (RUNNING, PAUSED)
        tokens, depths = (
            x[row, seen:count].tolist() for x in (progress.tokens_BO, progress.depth_BO)
        )
        parts = self.text.take(tokens, depths, ended)
        end = self.text.tokens_used
        self.steps = int(progress.steps_B[row])
        self.token_ids += tokens[: end - seen]
        self.depths += depths[: end - seen]
        new = logprobs_of_row(progress, row, slice(seen, end), self.options.logprobs)
        self.logprobs += new.get("logprobs", [])
        self.top_logprobs += new.get("top_logprobs", [])
        ending = None
        if ended or self.text.stopped:
            ending = self.ending(int(progress.status_B[row]))
        return Delta(
            text="".join(piece for piece, _ in parts),
            parts=parts,
            token_ids=self.token_ids[seen:],
            logprobs=self.logprobs[seen:],
            top_logprobs=self.top_logprobs[seen:],
            ending=ending,
        )

    def ending(self, status: int) -> Ending:
        """The answer, once it has ended.

        Args:
          status: why it did (`decoding/stopping.py`).
        """
        status = STOPPED if self.text.stopped else status
        limit = self.row.limits[0]
        histogram = steps_of(self.depths, self.longest)
        now = time.perf_counter()
        result = Result(
            text=self.text.text,
            token_ids=self.token_ids,
            draft_depths=self.depths,
            finish_reason=finish_reason(status, len(self.token_ids), limit, self.options),
            prompt_tokens=len(self.prompt),
            steps=sum(histogram),
            acceptance_histogram=histogram,
            prefill_seconds=self.first_at - self.started_at,
            decode_seconds=now - self.first_at,
            compile_seconds=0.0,
            logprobs=self.logprobs if self.options.logprobs is not None else None,
            top_logprobs=self.top_logprobs if self.options.logprobs is not None else None,
        )
        waited = self.started_at - self.submitted_at
        return Ending(result, waited, self.reused, self.tree_nodes)


def make_job(
    model: Model,
    request: Request,
    most_prompt: int,
    most_new: int,
    handle: Handle,
    deliver: Deliver,
) -> Job:
    """A job for a request.

    Args:
      most_prompt, most_new: tokens that a prompt and an answer may have at most.

    Raises:
      UserError: the model cannot answer that.
    """
    options = request.options
    model.engine(acceptance=request.acceptance, sampled=options.temperature > 0)
    prompt = model.encode(request.prompt)
    if len(prompt) > most_prompt:
        raise TooLong(
            f"the prompt has {len(prompt)} tokens, this server takes {most_prompt}: shorten it"
        )
    row = model.request([prompt], [options], [request.id])
    row.limits = [min(row.limits[0], most_new)]
    stops = row.stops[0] if row.stops else ()
    if len(stops) > STOPS[0] or max(map(len, stops), default=0) > STOPS[1]:
        raise UserError(
            f"a served request has room for {STOPS[0]} stop sequences of {STOPS[1]} tokens, the "
            "tokens that end a text among them; stop strings are not counted"
        )
    if request.min_tokens:
        ends = [ids[0] for ids in stops if len(ids) == 1]
        asked = replace(
            options.penalties, least=request.min_tokens, ends=(*ends, *request.stop_ids)
        )
        row.penalties = [asked]
    text = StoppingText(model.tokenizer, options.stop, request.stop_ids, request.min_tokens)
    job = Job(request, row, text, handle, deliver)
    if job.guide:
        job.guide.patience = SLOW_MASKS
    return job


def guides_of(jobs: Mapping[int, Job]) -> dict[int, Guide]:
    """By row, what knows its constraint."""
    return {row: job.guide for row, job in jobs.items() if job.guide}


def tell(jobs: Iterable[Job], error: Stopped) -> None:
    """Deliver to these requests; a failed delivery does not affect the others."""
    for job in jobs:
        with contextlib.suppress(Exception):
            job.deliver(error)
