"""`python -m research rehearsal`: a sample of the text of SmolLM2's heads, which heads read again while they learn."""

import dataclasses
import json
import lzma
import random
from pathlib import Path

import numpy as np

from medusa_jax.api.load import open_model
from medusa_jax.commands.flags import CommandLine, at_least, flag
from medusa_jax.text.answers import encode_conversation
from medusa_jax.whole_files import replacing

EXAMPLES = """examples:
  python -m research rehearsal --out medusa_jax/models/smollm2/rehearsal.npz
"""
ANSWERS = Path(__file__).parent / "answers.jsonl.xz"
# Conversations held out of the heads' training, the first of this order (medusa_jax/models/smollm2/README.md).
HELD_OUT, ORDER, MOST_TOKENS = 128, 7, 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Write the beginnings of some conversations as token ids."""

    n: int = flag("number of conversations", 240, type=at_least(1))
    out: str = flag("file to write", "work/rehearsal.npz")


def run(flags: Flags) -> int:
    """Write `tokens` and `counted` (the assistant's), text after text, and `lengths`."""
    with lzma.open(ANSWERS, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    random.Random(ORDER).shuffle(lines)
    trained = lines[HELD_OUT:]
    random.Random(1).shuffle(trained)
    tokenizer, texts = open_model("smollm2").tokenizer, []
    for record in map(json.loads, trained[: flags.n]):
        both = encode_conversation(tokenizer, record["messages"], "", "cut" in record)
        texts.append(np.array(both, np.uint16)[:, :MOST_TOKENS])
    tokens, counted = np.concatenate(texts, axis=1)
    lengths = np.array([text.shape[1] for text in texts], np.uint16)
    with replacing(flags.out) as new, open(new, "wb") as out:
        np.savez_compressed(out, tokens=tokens, counted=counted == 1, lengths=lengths)
    return 0


main = CommandLine("python -m research rehearsal", Flags, run, EXAMPLES)
