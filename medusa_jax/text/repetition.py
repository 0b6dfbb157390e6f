"""How much a text repeats itself: repetitive text is easy to draft."""

from collections.abc import Sequence

import numpy as np


def repeated_ngram_share(tokens: Sequence[int] | np.ndarray, n: int = 4) -> float:
    """Share of the n-grams of `tokens` that already occurred earlier in `tokens`.

    A sequence of T tokens has T - n + 1 n-grams, overlapping ones included; the answer is
    1 - distinct / (T - n + 1), and 0.0 if T < n.

        [1, 2, 3, 4, 1, 2, 3, 4]: 1234 2341 3412 4123 1234 -> the last repeats: 1 / 5 = 0.2
        [7, 7, 7, 7, 7, 7]: 7777 7777 7777 -> 2 / 3
    """
    ids = np.asarray(tokens)
    total = len(ids) - n + 1
    if total <= 0:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(ids, n)
    return 1.0 - len(np.unique(grams, axis=0)) / total


def mean_repeated_ngram_share(texts: Sequence[Sequence[int]]) -> float:
    """Mean of `repeated_ngram_share` over texts."""
    return float(np.mean([repeated_ngram_share(t) for t in texts])) if len(texts) else 0.0
