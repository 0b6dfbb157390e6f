"""Speculative against autoregressive decoding of the same requests, with the same engine, in one run."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.api import Model, Options, Result
from medusa_jax.decoding.generate import MIN_PROMPT, power_of_two
from medusa_jax.decoding.penalties import counted, penalised, penalties_of
from medusa_jax.decoding.repeats import without_barred
from medusa_jax.decoding.sampling import Sampling, filtered, gumbel, row_keys
from medusa_jax.errors import UserError
from medusa_jax.heads import Backbone
from medusa_jax.model.cache import KVCache
from medusa_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One request decoded both ways; times are medians over interleaved runs of the batch."""

    drafted: Result
    autoregressive: Result
    decode_seconds: float
    autoregressive_seconds: float
    identical: bool
    first_divergence: dict[str, Any] | None
    prefill_seconds: float
    autoregressive_prefill_seconds: float

    @property
    def has_steps(self) -> bool:
        """Whether both texts have tokens after the first, which comes from prefill."""
        return bool(self.drafted.steps and self.autoregressive.steps)

    @property
    def speedup(self) -> float | None:
        """Autoregressive over speculative seconds per token; None without steps."""
        if not self.has_steps:
            return None
        ours = self.decode_seconds / (self.drafted.new_tokens - 1)
        theirs = self.autoregressive_seconds / (self.autoregressive.new_tokens - 1)
        return theirs / ours

    @property
    def step_latency_ratio(self) -> float | None:
        """Speculative over autoregressive seconds per step; None without steps."""
        if not self.has_steps:
            return None
        ours = self.decode_seconds / self.drafted.steps
        return ours / (self.autoregressive_seconds / self.autoregressive.steps)

    def facts(self) -> dict[str, Any]:
        """The fields that `--compare` adds to the JSON object."""
        plain = dataclasses.replace(
            self.autoregressive, decode_seconds=self.autoregressive_seconds
        )
        return {
            "autoregressive": {
                "token_ids": plain.token_ids,
                "decode_seconds": plain.decode_seconds,
                "tokens_per_second": plain.tokens_per_second,
            },
            "speedup": self.speedup,
            "step_latency_ratio": self.step_latency_ratio,
            "identical": self.identical,
            "first_divergence": self.first_divergence,
        }


def compare(
    model: Model,
    prompts: Sequence[Any],
    options: Options | Sequence[Options],
    *,
    tree: str | Tree | None = None,
    ids: Sequence[int] | None = None,
    repeats: int = 3,
    **engine_options: Any,
) -> list[Comparison]:
    """Decode with the tree and without, `repeats` interleaved runs of each.

    `ids` as for `Model.generate`. With a lossy acceptance rule the autoregressive runs use plain
    sampling (or greedy decoding).

    Raises:
      UserError: `max_steps` is set; the two texts would end in different places.
    """
    rows = options if isinstance(options, Sequence) else [options]
    if any(o.max_steps for o in rows):
        raise UserError(
            "max_steps would end the drafted and the plain text in different places: compare without it"
        )
    runs: dict[str, list[list[Result]]] = {"drafted": [], "plain": []}
    for _ in range(max(1, repeats)):
        runs["drafted"].append(
            model.generate(prompts, options, ids, tree=tree, **engine_options)
        )
        runs["plain"].append(model.generate(prompts, options, ids, tree=Tree.none()))
    seconds, prefill = (
        {k: statistics.median(getattr(r[0], what) for r in v) for k, v in runs.items()}
        for what in ("decode_seconds", "prefill_seconds")
    )
    comparisons = []
    for row, (ours, theirs) in enumerate(zip(runs["drafted"][0], runs["plain"][0])):
        divergence = None
        pairs = zip(ours.token_ids, theirs.token_ids)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        identical = ours.token_ids == theirs.token_ids
        if not identical:
            first = min(ours.new_tokens, theirs.new_tokens) if first is None else first
            option = options[row] if isinstance(options, Sequence) else options
            text = [*model.encode(prompts[row]), *theirs.token_ids[:first]]
            gap = score_gap(
                model, text, ours.prompt_tokens, option, ids[row] if ids else row
            )
            divergence = {"position": first, "gap": gap}
        comparisons.append(
            Comparison(
                ours,
                theirs,
                seconds["drafted"],
                seconds["plain"],
                identical,
                divergence,
                prefill["drafted"],
                prefill["plain"],
            )
        )
    return comparisons


def score_gap(
    model: Model, text: Sequence[int], prompt_tokens: int, option: Options, request: int
) -> float:
    """Gap between the two best scores for the token after `text`.

    Scores are logits when greedy, filtered logits / T + noise when sampling. The gap tells how close
    plain decoding was to choosing another token.
    """
    T = len(text)
    padded = np.zeros((1, power_of_two(T, MIN_PROMPT)), np.int32)
    padded[0, :T] = text
    logits_1V = _logits_after(model.backbone, padded, np.int32(T))[0]
    logits_1V = without_barred(logits_1V, text, model.no_repeat_ngram_size)
    given, new = text[:prompt_tokens], jnp.array([text[prompt_tokens:]], jnp.int32)
    penalties = penalties_of([option.penalties], [given], logits_1V.shape[-1])
    penalties = counted(penalties, new, jnp.array([new.shape[1]]))
    logits_1V = penalised(logits_1V[None], penalties)[0]
    scores_1V = perturbed(logits_1V, T, option, request)
    best = np.sort(np.asarray(scores_1V[0], np.float64))[-2:]
    return float(best[1] - best[0])


def perturbed(
    logits_BV: jax.Array, position: int, option: Options, request: int
) -> jax.Array:
    """Scores [P, V] whose argmax plain decoding takes, for P logit rows of one position."""
    if option.temperature == 0:
        return logits_BV
    one = lambda value, kind: jnp.asarray(np.array([value], kind))  # noqa: E731
    sampling = Sampling(
        temperature_B=one(option.temperature, np.float32),
        top_k_B=one(option.top_k, np.int32),
        top_p_B=one(option.top_p, np.float32),
        min_p_B=one(option.min_p, np.float32),
        key_B=row_keys(one(option.seed % 2**32, np.uint32), one(request, np.int32)),
    )
    return _perturbed(logits_BV, sampling, one(position, np.int32)[:, None])


@jax.jit
def _perturbed(
    logits_BV: jax.Array, sampling: Sampling, position_11: jax.Array
) -> jax.Array:
    noise_11V = gumbel(sampling.key_B, position_11, logits_BV.shape[-1], logits_BV.dtype)
    noise_BV = jnp.broadcast_to(noise_11V[0], logits_BV.shape)
    return filtered(logits_BV[None], sampling)[0] + noise_BV


@jax.jit
def _logits_after(backbone: Backbone, tokens_1T: jax.Array, length: jax.Array) -> jax.Array:
    """Logits [1, 1, V] after the first `length` tokens, in one pass; the rest is padding."""
    config, T = backbone.llama.config, tokens_1T.shape[1]
    cache = KVCache.zeros(
        config.n_layers, 1, T, config.n_kv_heads, config.head_dim, backbone.llama.dtype
    )
    position_1T, start_1 = jnp.arange(T)[None, :], jnp.zeros((1,), jnp.int32)
    hidden_1TD, _ = backbone.decode(tokens_1T, position_1T, cache, start_1)
    return backbone.lm_head(lax.dynamic_slice_in_dim(hidden_1TD, length - 1, 1, axis=1))
