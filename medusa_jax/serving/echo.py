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
    logprobs: list[float | None] | None = None
    top_logprobs: list[list[tuple[int, float]] | None] | None = None


def scored(model: Model, text: str, request: Request) -> Echo:
    """The prompt of a request; takes as long as reading it."""
    ids, n = [int(i) for i in request.prompt], request.options.logprobs
    if n is None:
        return Echo(text, ids)
    most = min(MOST_BEST, model.config.vocab_size)
    params = model.variables["backbone"]
    logprobs, likeliest = score(model.llama, params, ids, most, piece_for(model))
    return Echo(text, ids, [None, *logprobs], [None, *(top[:n] for top in likeliest)])


def nothing(request: Request) -> Delta:
    """The answer to a request for no new tokens."""
    result = Result(
        text="",
        token_ids=[],
        draft_depths=[],
        finish_reason="length",
        prompt_tokens=len(request.prompt),
        steps=0,
        acceptance_histogram=[],
        prefill_seconds=0.0,
        decode_seconds=0.0,
        compile_seconds=0.0,
        logprobs=[],
        top_logprobs=[],
    )
    return Delta("", [], [], [], [], Ending(result, 0.0, 0, 1))
