"""A model's texts: prompts and the answers that plain decoding, or `distill`, wrote."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from medusa_jax.api import Model, Options
from medusa_jax.api.prompts import Prompt, equal_batches
from medusa_jax.files.json_files import optional_json
from medusa_jax.text.answers import encode_conversation
from medusa_jax.text.jinja import SampleError
from medusa_jax.whole_files import Json

# Batch size for writing texts and for ranking.
ROWS = 8


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
