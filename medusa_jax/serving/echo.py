"""Prompts that come back with an answer: how evaluation harnesses have texts scored."""

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_jax.api import Model, Result
from medusa_jax.decoding.scoring import score
from medusa_jax.serving.batch import MOST_BEST, piece_for
from medusa_jax.serving.request import Delta, Ending, Request


@dataclass(frozen=True)
class Echo:
    """A prompt, with the log-probabilities of its tokens if they were asked for.

    Attributes:
      logprobs, top_logprobs: as in `Result`; None for the first token, which follows nothing.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float | None] | None = None
    top_logprobs: Sequence[list[tuple[int, float]] | None] | None = None


def echo_of(model: Model, text: str, request: Request) -> Echo:
    """The prompt of a request; with log-probabilities this takes as long as reading it."""
    ids, n = [int(i) for i in request.prompt], request.options.logprobs
    if n is None:
        return Echo(text, ids)
    most = min(MOST_BEST, model.config.vocab_size)  # one program for all
    scored = score(model.backbone, ids, most, piece_for(model))
    logprobs, tops = [p for p, _ in scored], [top[:n] for _, top in scored]
    return Echo(text, ids, [None, *logprobs], [None, *tops])


def empty_answer(request: Request) -> Delta:
    """All of an answer of no tokens."""
    result = Result("", [], [], "length", len(request.prompt), 0, [], 0.0, 0.0, 0.0)
    return Delta("", [], [], [], [], Ending(result, 0.0, 0, 1))
