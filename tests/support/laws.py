"""Comparing what was drawn with the law that it should have."""

import numpy as np
from scipy.stats import chi2

# A test that draws from the right law fails once in this many runs (seeds are fixed, so
# in fact never); the mutation tests show that it notices a wrong one.
LEVEL = 1e-6


def law_of(tokens_NT, vocab: int) -> np.ndarray:
    """How often each tuple of T tokens came, [V] * T."""
    counts = np.zeros((vocab,) * tokens_NT.shape[1])
    np.add.at(counts, tuple(tokens_NT.T), 1)
    return counts


def total_variation(counts: np.ndarray, law: np.ndarray) -> float:
    """Half the summed difference of frequencies and probabilities."""
    return float(abs(counts / counts.sum() - law).sum() / 2)


def agrees(counts: np.ndarray, law: np.ndarray) -> bool:
    """Chi-square at LEVEL over the cells that can occur, and no draw anywhere else.

    Cells expecting fewer than five draws are taken together.
    """
    counts, law = counts.ravel(), law.ravel()
    if counts[law == 0].any():
        return False
    expected = law * counts.sum()
    rare = expected < 5
    pairs = [(counts[~rare], expected[~rare])]
    if expected[rare].sum() >= 5:
        pairs.append((counts[rare].sum(keepdims=True), expected[rare].sum(keepdims=True)))
    observed, wanted = (np.concatenate(side) for side in zip(*pairs))
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return len(wanted) < 2 or statistic < chi2.isf(LEVEL, len(wanted) - 1)
