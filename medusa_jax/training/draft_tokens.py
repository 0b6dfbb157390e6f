"""The draft vocabulary of a run: the tokens that its heads score."""

import os
from collections.abc import Sequence

import numpy as np

from medusa_jax.arch import HeadsConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.files.layouts.stored_heads import check_ids
from medusa_jax.heads.vocabulary import COUNTS, covered, most_frequent
from medusa_jax.training.data.rows import TokenRows
from medusa_jax.whole_files import read_array

DRAFT_VOCAB = "draft_vocab.npy"


def draft_vocab(
    heads: HeadsConfig, vocab_size: int, texts: Sequence[TokenRows], workdir: str,
    source: str = "", is_resumed: bool = False,
) -> np.ndarray:  # fmt: skip
    """Ids of the `heads.draft_vocab` most frequent tokens, ascending.

    A run without a checkpoint chooses them; a resumed run reads them from its workdir.

    Args:
      source: token counts (`data.draft_vocab_from`); "": those of the texts.

    Raises:
      UserError: counts that are unreadable or have the wrong size.
    """
    n, path = heads.draft_vocab, os.path.join(workdir, DRAFT_VOCAB)
    if is_resumed and os.path.exists(path):
        ids = read_array(path)
        check_ids(ids, heads, vocab_size, path)
        return ids
    text_counts_V = np.sum([text.counts(vocab_size) for text in texts], axis=0)
    counts_V = read_counts(source, vocab_size) if source else text_counts_V
    ids = most_frequent(counts_V, n)
    coverage = text_counts_V[ids].sum() / max(text_counts_V.sum(), 1)
    elsewhere = f", {100 * covered(counts_V, n):.2f}% of that in {source}" if source else ""
    inform(
        f"heads guess among {n} of {vocab_size} tokens: {100 * coverage:.2f}% of the text that they learn "
        f"from{elsewhere}"
    )
    return ids


def read_counts(source: str, vocab_size: int) -> np.ndarray:
    """Token counts [V] written by `distill`.

    Args:
      source: the file or its directory.
    """
    path = os.path.join(source, COUNTS) if os.path.isdir(source) else source
    counts_V = read_array(path)
    if counts_V.shape != (vocab_size,) or counts_V.dtype.kind not in "iu":
        raise UserError(
            f"{path} holds {counts_V.dtype}{list(counts_V.shape)}, not the counts of a vocabulary "
            f"of {vocab_size}"
        )
    return counts_V
