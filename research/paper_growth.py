"""Trees by products of head accuracies, as if these were independent: the estimate of Medusa 2.3.3.

`python -m medusa_jax calibrate` grows trees by the steps that they save instead.
"""

import heapq

import numpy as np

from medusa_jax.tree.tree import Choice


def product_growth(accuracy_KR: np.ndarray, n_choices: int) -> list[Choice]:
    """Nodes by the product of accuracies along their path: the paper's estimate.

    The accuracies are taken as independent; ranks with accuracy 0 are left out.
    """
    K, R = accuracy_KR.shape
    heap: list[tuple[float, int, Choice]] = []

    def push_children(path: Choice, worth: float) -> None:
        if len(path) < K:
            for rank in range(R):
                child = worth * float(accuracy_KR[len(path), rank])
                if child > 0:
                    heapq.heappush(heap, (-child, len(path) + 1, (*path, rank)))

    push_children((), 1.0)
    growth: list[Choice] = []
    while heap and len(growth) < n_choices:
        negative, _, path = heapq.heappop(heap)
        growth.append(path)
        push_children(path, -negative)
    return growth


def best_cartesian(accuracy_KR: np.ndarray, n_nodes: int) -> list[int]:
    """Widths of the Cartesian tree with the most expected tokens per step.

    Searches all widths of at most `n_nodes` nodes, root included; expected tokens are products of
    head accuracies. Example: heads whose first guess is right in 0.6 and whose second in 0.2 of all
    cases, 4 nodes: [1, 1, 1] expects 1 + 0.6 + 0.36 + 0.22 tokens, [2] expects 1 + 0.8.
    """
    K, R = accuracy_KR.shape
    within_KR = np.cumsum(accuracy_KR, axis=1)
    best: tuple[float, list[int]] = (1.0, [])

    def extend(
        widths: list[int], level: int, nodes: int, path: float, tokens: float
    ) -> None:
        nonlocal best
        best = max(best, (tokens, widths), key=lambda found: found[0])
        if len(widths) == K:
            return
        for width in range(1, R + 1):
            if nodes + level * width > n_nodes:
                break
            reached = path * float(within_KR[len(widths), width - 1])
            extend(
                [*widths, width],
                level * width,
                nodes + level * width,
                reached,
                tokens + reached,
            )

    extend([], 1, 1, 1.0, 1.0)
    return best[1]
