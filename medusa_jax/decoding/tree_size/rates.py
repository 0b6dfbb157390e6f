"""How many tokens per step each size of a tree gives, estimated from the drafts accepted so far.

With size n of depth d, a step emits 1 + q_1 + q_1 q_2 + ... + q_1 ... q_d tokens on average, where q_l is the
rate at which drafts of level l are accepted after those above them. A tree file says how many tokens per
step each size gives; p_n is the rate that gives this number if all levels have it. Without a file p_n = 1/2. We
assume that a text changes the rates of all sizes by one exponent per level, q_l = p_n^(g_l), so that

    tokens(n) = 1 + p_n^(g_1) + p_n^(g_1 + g_2) + ... + p_n^(g_1 + ... + g_d)
    g_l = log(share of drafts of level l accepted on this text) / log(share that the p_n expect)

Both shares are over the latest steps, of all sizes; a level that was not tested takes g of the one above.

The counts [3, L] by level, from 1: drafts accepted, drafts tested, and how many of these the p_n expect to be accepted.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

# Half-life of the counts, in steps that tested drafts.
RECENT = 64
# At the beginning of a text or a trial the evidence counts as PRIOR tested drafts of level 1; at other levels the level
# above counts as ABOVE.
PRIOR, ABOVE = 4.0, 2.0
# Bounds of a rate, which keep its logarithm finite and below 0; the rate without evidence.
LEAST_RATE, MOST_RATE, UNKNOWN = 1e-3, 0.999, 0.5


def rates_of(tokens_N: Sequence[float] | None, depths: Sequence[int]) -> np.ndarray:
    """The rates p_n of sizes with these tokens per step; without evidence `UNKNOWN`."""
    if tokens_N is None:
        return np.full(len(depths), UNKNOWN)
    return np.array([rate_of(*pair) for pair in zip(tokens_N, depths)])


def rate_of(tokens_per_step: float, depth: int) -> float:
    """The rate p with 1 + p + ... + p^depth = tokens_per_step, within the bounds of a rate."""
    low, high = LEAST_RATE, MOST_RATE
    for _ in range(30):
        p = (low + high) / 2
        if sum(p**level for level in range(depth + 1)) < tokens_per_step:
            low = p
        else:
            high = p
    return low


def first_counts(rate_N: Any, levels: int) -> list[Any]:
    """The counts before a text: only the evidence of the largest size."""
    tested_L = np.float32(PRIOR) * (np.arange(levels) == 0)
    right_L = tested_L * rate_N[-1]
    return [right_L, tested_L, right_L]


def tokens_by_size(counts_3L: Any, rate_N: Any, depths: Sequence[int], xp: Any) -> Any:
    """Tokens per step to expect with each size [..., N], by the formula of this file.

    Args:
      counts_3L: counts [3, ..., L].
      xp: the module of arrays, jax.numpy or numpy.
    """
    rate, (accepted_L, tested_L, expected_L) = rate_N[-1], counts_3L
    exponent, total, totals = 1.0, 0.0, []
    for level in range(tested_L.shape[-1]):
        weight = ABOVE if level else 0.0
        tests = tested_L[..., level] + weight
        accepted = (accepted_L[..., level] + weight * rate**exponent) / tests
        expected = (expected_L[..., level] + weight * rate) / tests
        accepted = xp.clip(accepted, LEAST_RATE, MOST_RATE)
        expected = xp.clip(expected, LEAST_RATE, MOST_RATE)
        exponent = xp.log(accepted) / xp.log(expected)
        total = total + exponent
        totals.append(total)
    reached_NL = rate_N[:, None] ** xp.stack(totals, axis=-1)[..., None, :]
    has_NL = np.arange(1, len(totals) + 1) <= np.array(depths)[:, None]
    return 1 + xp.sum(xp.where(has_NL, reached_NL, 0.0), axis=-1)
