"""Record how well drafts would do at every position of the model's own texts.

Lossless decoding writes the text of plain decoding, whatever the drafter. So one teacher-forced pass
over that text gives the guess of each head at every position, and from these the mean accepted length
of any tree (`tree/growth.py: replay`), without decoding again.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.api import Model, Options
from medusa_jax.api.prompts import Prompt, equal_batches
from medusa_jax.decoding.copies import REPEATS
from medusa_jax.decoding.request import power_of_two
from medusa_jax.decoding.sampling import row_keys
from medusa_jax.evaluate.ranks import copied_lengths, rank_tuples
from medusa_jax.files.json_files import optional_json
from medusa_jax.text.answers import encode_conversation
from medusa_jax.text.jinja import SampleError
from medusa_jax.tree.growth import TextRanks
from medusa_jax.whole_files import Json

# Longest chain copied from the text, as in prompt lookup.
MOST_COPIED = 10
# Batch size for writing texts and for ranking.
ROWS = 8


_lengths = jax.jit(jax.vmap(copied_lengths, (0, 0, None)), static_argnums=2)
_ranks = jax.jit(rank_tuples, static_argnames=("drafter", "no_repeat_ngram_size"))


class Text(NamedTuple):
    """A prompt and the model's answer.

    Attributes:
      ids: all tokens.
      n_prompt: number of prompt tokens among them.
    """

    ids: list[int]
    n_prompt: int

    @property
    def prompt(self) -> list[int]:
        return self.ids[: self.n_prompt]

    @property
    def answer(self) -> list[int]:
        return self.ids[self.n_prompt :]


def distilled_texts(
    model: Model, source: str, records: Sequence[Json], most_tokens: int
) -> list[Text]:
    """The texts that `distill` let this very model write, if the records of `source` are those; else [].

    Args:
      most_tokens: longer answers are cut.
    """
    settings = optional_json(os.path.join(os.path.dirname(source), "settings.json"))
    if settings.get("fingerprint") != model.fingerprint:
        return []
    texts = []
    for record in records:
        with suppress(SampleError, LookupError):  # a record without an answer
            if "token_ids" in record:
                prompt, answer = record["prompt_ids"], record["token_ids"]
            else:
                given = record["messages"], settings["chat_template"], "cut" in record
                ids, mask = encode_conversation(model.tokenizer, *given)
                end = len(mask) - mask[::-1].index(1)
                start = max((i + 1 for i in range(end) if not mask[i]), default=0)
                prompt, answer = ids[:start], ids[start:end]
            texts.append(Text([*prompt, *answer[:most_tokens]], len(prompt)))
    return texts


def answer_prompts(
    model: Model,
    prompts: Sequence[Prompt],
    options: Options,
    watch: Callable[[np.ndarray], None] | None = None,
) -> list[Text]:
    """Answer each prompt by plain decoding, each as request 0.

    Args:
      watch: as for `Model.generate`.
    """
    texts = []
    for numbers, rows in equal_batches(len(prompts), ROWS):
        batch = [model.encode(prompts[i]) for i in rows]
        results = model.generate(batch, options, [0] * len(rows), watch, tree="none")
        for _, ids, result in zip(numbers, batch, results):
            texts.append(Text([*ids, *result.token_ids], len(ids)))
    return texts


def record(model: Model, texts: Sequence[Text], options: Options) -> list[TextRanks]:
    """Record ranks and correct copies at the positions of each text where a step may begin.

    These are the positions from the last prompt token on for which the text has the token of the
    deepest head. A short text may have none.

    Args:
      options: of the texts. Above temperature 0 drafts are ranked with the verifier's noise.
    """
    records, drafter, no_repeat = [], model.drafter, model.no_repeat_ngram_size
    for numbers, rows in equal_batches(len(texts), ROWS):
        noise = None
        if options.temperature > 0:
            seed_B = jnp.full((len(rows),), options.seed % 2**32, jnp.uint32)
            keys = row_keys(seed_B, jnp.zeros((len(rows),), jnp.int32))
            noise = (keys, jnp.full((len(rows),), options.temperature))
        ids = [texts[i].ids for i in rows]
        length_B: np.ndarray = np.array([len(x) for x in ids], np.int32)
        n_slots = power_of_two(int(length_B.max()), 64)
        tokens_BT = np.zeros((len(rows), n_slots), np.int32)
        for row, x in zip(tokens_BT, ids):
            row[: len(x)] = x
        tokens = jnp.asarray(tokens_BT)
        heads, backbone = model.variables["heads"], model.backbone
        ranks_BTK = np.asarray(
            _ranks(drafter, heads, backbone, tokens, length_B, noise, no_repeat)
        )
        copied_BT, match_BT = map(np.asarray, _lengths(tokens, length_B, MOST_COPIED))
        for b, i in enumerate(numbers):
            # The step after prefill starts at the last prompt position.
            start, end = texts[i].n_prompt - 1, len(ids[b]) - drafter.n_heads - 1
            span = slice(start, max(start, end))
            repeats_P = match_BT[b, span] >= REPEATS
            records.append(TextRanks(ranks_BTK[b, span], copied_BT[b, span], repeats_P))
    return records
