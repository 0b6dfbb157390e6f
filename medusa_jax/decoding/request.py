"""A batch of prompts with their options, on the host, and its arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import DTypeLike

from medusa_jax.arch import DELTA, EPSILON
from medusa_jax.decoding.penalties import PenaltyOptions, penalties_of
from medusa_jax.decoding.prefill import PromptArrays
from medusa_jax.decoding.sampling import Sampling, row_keys
from medusa_jax.decoding.state import Engine, RowOptions
from medusa_jax.decoding.stopping import pack_ends
from medusa_jax.decoding.token_sets import first_bits
from medusa_jax.decoding.tree_size.costs import StepCosts
from medusa_jax.decoding.tree_size.gate import Gate
from medusa_jax.host_calls import HostFunction
from medusa_jax.programs import program

if TYPE_CHECKING:
    from medusa_jax.constraints.guide import Guide

MIN_PROMPT = 16  # shorter prompts are padded to it, and share its programs


@dataclass
class DecodeRequest:
    """Prompts and options of a batch, on the host. Sequences have one entry per row, except `drafts`.

    Attributes:
      prompts: token ids, none empty.
      limits: maximum number of tokens to emit per row, at least 1; prompt + limit must fit the context.
      ends: per row the tokens that end it; they stay in the text.
      temperature, top_k, top_p, min_p, seed: per-row sampling parameters.
      ids: request ids for the noise, by default the row numbers.
      epsilon, delta: thresholds of typical acceptance.
      penalties: biases and penalties.
      guides: the constraint of each row, not used before; None if no row has one.
      host: answers the steps with guides, `constrained_step.host_step`.
      gate: of a gated engine, before the first step.
      costs: times of the gate's sizes, which streams measure.
      drafts: (nodes, drafter) of each tree that a step may take, for reports; empty when serving.
      predicted: tokens that are expected in each text, for served rows to copy drafts from.
    """

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    ends: Sequence[Sequence[int]] | None = None
    temperature: Sequence[float] | None = None
    top_k: Sequence[int] | None = None
    top_p: Sequence[float] | None = None
    min_p: Sequence[float] | None = None
    seed: Sequence[int] | None = None
    ids: Sequence[int] | None = None
    epsilon: Sequence[float] | None = None
    delta: Sequence[float] | None = None
    penalties: Sequence[PenaltyOptions] | None = None
    guides: "Sequence[Guide | None] | None" = None
    host: HostFunction | None = None
    gate: Gate | None = None
    costs: StepCosts | None = None
    drafts: Sequence[tuple[int, str]] = ()
    predicted: Sequence[Sequence[int]] | None = None


# On the host; `row_keys` is called in traces, too.
keys_of_rows = program()(row_keys)


def begin_keys() -> None:
    """Begin to compile the keys of one row: a start needs them before it can trace how the prompt is read."""
    keys_of_rows.prepare(np.zeros(1, np.uint32), np.zeros(1, np.uint32))


def row_options(request: DecodeRequest, vocab_size: int, ends: int = 1) -> RowOptions:
    """The options of each row of a request, in NumPy's arrays.

    Args:
      ends: least number of tokens that end a row.
    """
    B = len(request.prompts)

    def per_row(values: Sequence | None, default: float, dtype: DTypeLike) -> Any:
        return np.array(values if values is not None else [default] * B, dtype)

    ids = request.ids if request.ids is not None else range(B)
    sampling = Sampling(
        temperature_B=per_row(request.temperature, 0.0, np.float32),
        top_k_B=per_row(request.top_k, 0, np.int32),
        top_p_B=per_row(request.top_p, 1.0, np.float32),
        min_p_B=per_row(request.min_p, 0.0, np.float32),
        key_B=keys_of_rows(per_row(request.seed, 0, np.uint32), np.array(ids, np.uint32)),
        epsilon_B=per_row(request.epsilon, EPSILON, np.float32),
        delta_B=per_row(request.delta, DELTA, np.float32),
        penalties=penalties_of(request.penalties, request.prompts, vocab_size),
        first_BW=first_bits(request.guides, vocab_size),
    )
    end_BQ: Any = pack_ends(request.ends or [()] * B, ends)
    return RowOptions(sampling, per_row(request.limits, 0, np.int32), end_BQ)


def sizes_of(engine: Engine, request: DecodeRequest) -> tuple[int, ...]:
    """Tokens of a request's padded prompts, slots for new tokens, and successive cache sizes."""
    lengths = [len(prompt) for prompt in request.prompts]
    needed = max(map(sum, zip(lengths, request.limits))) + engine.free_slots
    cache_sizes = successive_sizes(engine, max(lengths), needed)
    T = min(power_of_two(max(lengths), MIN_PROMPT), cache_sizes[0])
    return T, output_slots(engine, max(request.limits)), *cache_sizes


def prompt_arrays(engine: Engine, request: DecodeRequest) -> tuple[list[int], PromptArrays]:
    """Successive cache sizes of a request, and its arrays for `prefill` with the first size."""
    T, outputs, *cache_sizes = sizes_of(engine, request)
    B = len(request.prompts)
    lengths: Any = np.array([len(p) for p in request.prompts], np.int32)
    options = row_options(request, engine.llama.config.vocab_size)
    if lengths.min() < 1 or min(request.limits) < 1:
        raise ValueError("every row needs a prompt of at least one token and a limit >= 1")
    prompt_BT: Any = np.zeros((B, T), np.int32)
    for row, prompt in enumerate(request.prompts):
        prompt_BT[row, : len(prompt)] = prompt

    output: Any = np.zeros((B, outputs), np.int32)
    prompts = PromptArrays(
        prompt_BT=prompt_BT, prompt_length_B=lengths, options=options, output_BO=output
    )
    return cache_sizes, prompts


def power_of_two(n: int, minimum: int) -> int:
    """The smallest power of two that is at least n and at least `minimum`."""
    return max(minimum, 1 << max(0, n - 1).bit_length())


def successive_sizes(engine: Engine, longest_prompt: int, needed: int) -> list[int]:
    """Successive cache sizes: powers of two, up to the first that suffices.

    Args:
      longest_prompt: tokens of the longest prompt.
      needed: slots of the longest possible row, prompt + limit + `engine.free_slots`.
    """
    first = power_of_two(longest_prompt + engine.free_slots, engine.kernels.least_slots)
    cache_sizes = [first]
    while cache_sizes[-1] < needed:
        cache_sizes.append(2 * cache_sizes[-1])
    return cache_sizes


def output_slots(engine: Engine, limit: int) -> int:
    """Slots for new tokens: `limit` plus a whole path, rounded up to a power of two, at least 64.

    Requests with similar limits, and all with small ones, share one compiled program; a slot takes few bytes.
    """
    return power_of_two(limit + engine.tree.path_length, 64)
