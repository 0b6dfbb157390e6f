"""`python -m research rounding`: integer activations against float32, by their next tokens and their texts.

A model writes greedy texts with float32 weights. The same texts are then read with the weights as they are stored,
times activations of 16 and of 8 bits.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.api import Model
from medusa_jax.arch import ACTIVATIONS
from medusa_jax.commands.flags import Program
from medusa_jax.commands.model_flags import (
    BaseFlags,
    GenerationFlags,
    generation_options,
    load_model,
)
from medusa_jax.evaluate.tables import Cell, table_of
from medusa_jax.whole_files import Json
from research.asking import PromptFlags, first_prompts, questions_of

EXAMPLES = """examples:
  python -m research rounding --model smollm2 --questions mt_bench.jsonl --limit 16 --max_new_tokens 128
"""
COLUMNS: dict[str, Cell] = {
    "activations": "{bits} bits",
    "KL, mean": "{divergence:.1e}",
    "largest": "{largest:.1e}",
    "best token differs": "{differ} of {tokens}",
    "equal texts": "{equal} of {texts}",
}


@dataclass(frozen=True, kw_only=True)
class Flags(PromptFlags, GenerationFlags, BaseFlags):
    """Compare integer activations with float32."""


def run(flags: Flags) -> int:
    """One row for each number of bits."""
    options = generation_options(flags, eos_ids=())
    questions = questions_of(flags, flags.model)
    floats = load_model(replace(flags, weights="float32"), "none")
    prompts = first_prompts(flags, floats, questions, flags.max_new_tokens)
    texts = [floats.generate([prompt], options)[0].token_ids for prompt in prompts]
    pairs = list(zip(prompts, texts))
    wanted = [log_probabilities(floats, *pair) for pair in pairs]
    rows: list[Json] = []
    for bits in ACTIVATIONS:
        model = load_model(replace(flags, activations=bits), "none")
        equal = [model.generate([p], options)[0].token_ids == text for p, text in pairs]
        got = [log_probabilities(model, *pair) for pair in pairs]
        apart = np.concatenate(
            [np.sum(np.exp(w) * (w - g), -1) for w, g in zip(wanted, got)]
        )
        differ = [np.sum(w.argmax(-1) != g.argmax(-1)) for w, g in zip(wanted, got)]
        row = {"bits": bits, "divergence": apart.mean(), "largest": apart.max()}
        row |= {"differ": sum(differ), "tokens": apart.size}
        rows.append(row | {"equal": sum(equal), "texts": len(equal)})
    print(table_of(rows, COLUMNS))
    return 0


def log_probabilities(model: Model, prompt: list[int], text: list[int]) -> np.ndarray:
    """Of the token at each place of the text, [tokens, vocabulary] in float64."""
    ids_BT = jnp.asarray([[*prompt, *text[:-1]]])
    positions_BT = jnp.arange(ids_BT.shape[1])[None]
    hidden_BTD = model.backbone.forward(ids_BT, positions_BT, jnp.ones_like(ids_BT))
    logits_BTV = model.backbone.lm_head(hidden_BTD[:, len(prompt) - 1 :])
    return np.asarray(jax.nn.log_softmax(logits_BTV[0].astype(jnp.float32)), np.float64)


main = Program("python -m research rounding", Flags, run, EXAMPLES)
