"""One training sample with its counted tokens marked: shows a wrong mask."""

import os
from itertools import groupby

from medusa_jax.config import DataConfig
from medusa_jax.errors import UserError
from medusa_jax.interop.tokenizer import Tokenizer
from medusa_jax.training.data import sources
from medusa_jax.training.data.tokenise import Encoder, tokenizer_for


def preview(data: DataConfig, tokenizer: str) -> str:
    """The first usable sample of `data.source`, with its counted tokens inside ⟦ ⟧; "" of a token directory.

    Raises:
      UserError: the source is unreadable or has no usable sample, or no tokenizer is given.
    """
    source = sources.names(data.source)[0]
    if os.path.isfile(os.path.join(source, "tokens.npy")):
        return ""
    encode = Encoder(tokenizer_for(source, tokenizer), data)
    samples = sources.read_records(source, data)
    problems = {}
    for number, record in enumerate(samples):
        found = encode(record)
        if not found.pieces:
            problems[number] = found.problem
            continue
        ids, counts = found.pieces[0]
        kept = min(len(ids), data.seq_len) if data.packing == "first_fit" else len(ids)
        counted = [c > 0 for c in counts[:kept]]
        return (
            f"{mark_counted(encode.tokenizer, ids[:kept], counted)}\n{'-' * 60}\n"
            f"sample {number} of {len(samples)} in {source} ({found.form}): {kept} of {len(ids)} tokens, "
            f"{sum(counted)} of them counted (the loss is computed on these): ⟦like this⟧"
        )
    raise UserError(
        f"none of the {len(samples)} samples of {source} can be used: "
        f"{sources.reasons(problems, samples)}"
    )


def mark_counted(tokenizer: Tokenizer, ids: list[int], counted: list[bool]) -> str:
    """Text of the ids, special tokens included, each run of counted ones inside ⟦ ⟧.

    A counted line break is shown as ↵. A character with bytes in several tokens belongs to the run that completes
    it.

    Example: ids of "Hi. Yo</s>" with the last two counted -> "Hi. ⟦Yo</s>⟧".
    """
    text, end, done = "", 0, ""
    for is_counted, group in groupby(counted):
        end += len(list(group))
        upto = tokenizer.decode(ids[:end], skip_special=False)
        if end < len(ids):
            upto = upto.rstrip("\ufffd")
        piece, done = upto[len(done) :], upto
        if is_counted:
            lines = piece.replace("\n", "↵\n").split("\n")
            piece = "\n".join(f"⟦{x}⟧" if x else x for x in lines)
        text += piece
    return text
