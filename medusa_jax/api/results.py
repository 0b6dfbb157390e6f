"""The options of a request, and its result."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from medusa_jax.arch import DELTA, EPSILON
from medusa_jax.console import inform
from medusa_jax.decoding.penalties import PenaltyOptions
from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.decoding.state import Progress
from medusa_jax.decoding.stopping import BROKEN, STOPPED, STUCK
from medusa_jax.text.tokenizer import Tokenizer
from medusa_jax.typed import checked_arguments, read_fields
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.constraints import Constraint

# By option: a test of its value, and the description of allowed values.
LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda n: n >= 1, "a whole number, at least 1"),
    "logprobs": (lambda n: n is None or n >= 0, "0 or more alternatives"),
    "seed": (lambda _: True, "a whole number"),
    "stop": (
        lambda texts: not any("\ud800" <= c <= "\udfff" for text in texts for c in text),
        "text or a list of texts, without unpaired surrogates",
    ),
    # Numbers further out overflow the logits in float32.
    "temperature": (lambda t: t == 0 or 1e-30 <= t <= 1e30, "0 or 1e-30 to 1e30"),
    "top_p": (lambda p: 0 <= p <= 1, "in [0, 1]"),
    "min_p": (lambda p: 0 <= p <= 1, "in [0, 1]"),
    "top_k": (lambda k: 0 <= k < 2**31, "a whole number, 0 (off) to 2**31 - 1"),
    "eos_ids": (lambda ids: not ids or min(ids) >= 0, "a list of token ids, 0 or more"),
    "epsilon": (lambda e: 0 < e <= 1, "in (0, 1]"),
    "delta": (lambda d: d > 0, "a positive number"),
    "presence_penalty": (lambda p: abs(p) <= 1e30, "from -1e30 to 1e30"),
    "frequency_penalty": (lambda p: abs(p) <= 1e30, "from -1e30 to 1e30"),
    "repetition_penalty": (lambda p: p is None or 1e-30 <= p <= 1e30, "from 1e-30 to 1e30"),
    "logit_bias": (
        lambda pairs: all(i >= 0 and abs(bias) <= 1e30 for i, bias in pairs),
        "numbers up to 1e30 by token id, such as {15: -100}",
    ),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """How one request is decoded.

    Attributes:
      max_new_tokens: most tokens to emit.
      temperature: 0 is greedy.
      top_k: keep the k likeliest tokens; 0 keeps all. Filters follow temperature, in this order.
      top_p: keep the likeliest tokens up to this mass; 1 keeps all, 0 the likeliest one.
      min_p: drop tokens below this share of the likeliest one's probability; 0 drops none.
      seed: random seed; draws depend only on it and on the request's index.
      stop: strings, or a single one, that end the text; they are cut off the text, not off its tokens.
      eos_ids: tokens that end the text and are kept; None: the model's, (): none.
      logprobs: store the log-probabilities of the emitted tokens and of the N likeliest alternatives at each
        position, by the model at temperature 1 without filters. None stores nothing.
      presence_penalty: subtracted from the logits of tokens in the generated text.
      frequency_penalty: subtracted from them once per occurrence.
      repetition_penalty: divides the positive logits of tokens of prompt and text and multiplies the
        negative ones; 1 changes nothing, None: the model's.
      logit_bias: numbers to add to the logits of some tokens, by token id; {15: -100} bars token 15.
      constraint: restricts the text, one of {"json_schema": schema}, {"json_object": True},
        {"regex": text}, {"choice": texts} and {"grammar": Lark or GBNF}; needs llguidance.
      epsilon: hard threshold of typical acceptance (Medusa 2.3.1); other rules ignore it.
      delta: entropy threshold of typical acceptance.
    """

    max_new_tokens: int = 200
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] | None = None
    epsilon: float = EPSILON
    delta: float = DELTA
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    constraint: "Constraint | Json | None" = None

    def __post_init__(self) -> None:
        read_fields(self, LIMITS)
        if self.constraint is not None:
            from medusa_jax.constraints import constraint_of  # here: few have one

            object.__setattr__(self, "constraint", constraint_of(self.constraint))

    def with_penalty(self, default: float) -> "Options":
        """These options with a repetition penalty, `default` if they name none."""
        if self.repetition_penalty is not None:
            return self
        return dataclasses.replace(self, repetition_penalty=default)

    @property
    def penalties(self) -> PenaltyOptions:
        """Biases and penalties as the decode loop takes them, after `with_penalty`."""
        repetition = 1.0 if self.repetition_penalty is None else self.repetition_penalty
        numbers = self.presence_penalty, self.frequency_penalty, repetition
        return PenaltyOptions(*numbers, bias=tuple(dict(self.logit_bias).items()))


Options.__init__ = checked_arguments(types=False)(Options.__init__)  # type: ignore[method-assign]
DEFAULTS = Options()


@dataclasses.dataclass
class Result:
    """One decoded request.

    Attributes:
      text: the generated text without special tokens and stop strings.
      token_ids: of this text, and of what ended it: an EOS or a stop string.
      draft_depths: for each token the tree depth it was accepted at, negative if it was copied from the
        text; 0 = the verifier's own.
      finish_reason: "stop" (EOS or stop string), "length", "context",
        "constraint": no token of the vocabulary may follow, or "error": no token has a score (`NO_SCORES`).
      prompt_tokens: tokens of the prompt, including an added BOS.
      steps: decode steps after prefill.
      mean_accepted_length: tokens appended per step, bonus token included.
      acceptance_histogram: steps that appended 1, 2, ... tokens.
      prefill_seconds: time to read the prompts of the whole batch, without compilation.
      decode_seconds: time of its decode steps, likewise.
      compile_seconds: time to compile programs for this call; 0 if they were compiled already.
      logprobs: log-probability of each token (nats), if requested.
      tree_nodes: size of the tree used in most steps, 1 for plain decoding; None in a server's (`Ending.tree_nodes`).
      drafter: who drafted, such as "hydra+copy", or "none"; None in a server's.
      top_logprobs: for each token the likeliest alternatives, pairs of id and log-probability,
        descending, without barred tokens (`no_repeat_ngram_size`).
    """

    text: str
    token_ids: list[int]
    draft_depths: list[int]
    finish_reason: str
    prompt_tokens: int
    steps: int
    acceptance_histogram: list[int]
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    tree_nodes: int | None = None
    drafter: str | None = None

    def cut(self, n_tokens: int, text: str) -> None:
        """Truncate to the text before a stop string, and to the tokens up to its end."""
        self.text, self.finish_reason = text, "stop"
        self.token_ids = self.token_ids[:n_tokens]
        self.draft_depths = self.draft_depths[:n_tokens]
        self.logprobs = self.logprobs and self.logprobs[:n_tokens]
        self.top_logprobs = self.top_logprobs and self.top_logprobs[:n_tokens]
        lengths, most = self.accepted_lengths, len(self.acceptance_histogram)
        self.acceptance_histogram = [lengths.count(n) for n in range(1, most + 1)]
        self.steps = len(lengths)

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def accepted_lengths(self) -> list[int]:
        """Tokens that each step appended, in order, its bonus token included.

        Every step ends with a token of depth 0, the verifier's own; the first token is prefill's.

        Example: depths 0 1 2 0 0 1 are prefill, a step of three tokens, one of one, and one that was cut after its
        first draft: [3, 1, 1].
        """
        lengths, length = [], 0
        for at, depth in enumerate(self.draft_depths[1:], 2):
            length += 1
            if depth == 0 or at == len(self.draft_depths):
                lengths.append(length)
                length = 0
        return lengths

    @property
    def mean_accepted_length(self) -> float:
        appended = sum((i + 1) * n for i, n in enumerate(self.acceptance_histogram))
        return appended / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first one, per second of decoding."""
        if self.new_tokens < 2 or self.decode_seconds <= 0:
            return 0.0
        return (self.new_tokens - 1) / self.decode_seconds


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text of one row while streaming: pairs of text and draft depth (`Result.draft_depths`)."""

    row: int
    parts: list[tuple[str, int]]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)


ENDS = {STOPPED: "stop", STUCK: "constraint", BROKEN: "error"}
NO_SCORES = (
    "the model's scores are NaN, or minus infinity for every token: look at its weights, use a wider dtype, or bar "
    "fewer tokens"
)


def results_of(
    tokenizer: Tokenizer,
    rows: Sequence[Options],
    request: DecodeRequest,
    progress: Progress,
    seconds: tuple[float, float, float],
) -> list[Result]:
    """The results of a finished batch; `seconds` of prefill, of decoding and of compiling."""
    tokens, depths = np.asarray(progress.tokens_BO), np.asarray(progress.depth_BO)
    counts, status = np.asarray(progress.n_new_B), np.asarray(progress.status_B)
    steps, histogram = np.asarray(progress.steps_B), np.asarray(progress.histogram_BL)
    results = []
    if BROKEN in status:
        inform(f"a text ends early: {NO_SCORES}")
    size = int(np.argmax(progress.gate.steps_N)) if progress.gate is not None else 0
    nodes, drafter = request.drafts[size] if request.drafts else (None, None)
    for row, options in enumerate(rows):
        ids = tokens[row, : counts[row]].tolist()
        is_full = request.limits[row] < options.max_new_tokens
        results.append(
            Result(
                text=tokenizer.decode_after(request.prompts[row], ids),
                token_ids=ids,
                draft_depths=depths[row, : counts[row]].tolist(),
                finish_reason=ENDS.get(
                    int(status[row]), "context" if is_full else "length"
                ),
                prompt_tokens=len(request.prompts[row]),
                steps=int(steps[row]),
                acceptance_histogram=histogram[row].tolist(),
                prefill_seconds=seconds[0],
                decode_seconds=seconds[1],
                compile_seconds=seconds[2],
                tree_nodes=nodes,
                drafter=drafter,
                **logprobs_of_row(progress, row, slice(int(counts[row])), options.logprobs),
            )
        )
    return results


def logprobs_of_row(progress: Progress, row: int, places: slice, n: int | None) -> Json:
    """The log-probability fields of a result for some tokens, with `n` alternatives."""
    if n is None or progress.logprobs is None:
        return {}
    lists = jax.tree.map(lambda x: np.asarray(x)[row, places].tolist(), progress.logprobs)
    likeliest = zip(lists.best_ids_BON, lists.best_BON)
    return {
        "logprobs": lists.token_BO,
        "top_logprobs": [
            [(i, p) for i, p in zip(ids[:n], values[:n]) if p > -math.inf]
            for ids, values in likeliest
        ],
    }
