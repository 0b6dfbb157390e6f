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
