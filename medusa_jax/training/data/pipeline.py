"""The input pipeline: batches by the number of their step, read ahead in threads by Grain."""

from collections.abc import Iterator
from typing import Any

import numpy as np

# Batches that are ready before they are asked for, and the threads that make them.
READ_AHEAD, THREADS = 4, 2


def batches(
    rows: Any,
    batch_size: int,
    first_step: int,
    last_step: int,
    own: np.ndarray | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """This process's share of the batch of every step, in order.

    What a step reads is a pure function of its number: step n has rows number
    (n - 1) batch_size and on, of which every process reads those that its devices hold. So a
    resumed run needs no iterator state, and nothing but time depends on the reading ahead or
    on the number of processes.

    Args:
      rows: `TokenRows`, or rows with cached features; `rows.batch(first, n)` gives n of them.
      first_step, last_step: 1-based, both included.
      own: which rows of a batch this process reads, rising; None: all.
    """
    import grain  # takes a second, and only training reads rows

    numbers = np.arange(batch_size) if own is None else own
    steps = grain.MapDataset.range(first_step, last_step + 1)
    made = steps.map(lambda step: read(rows, (step - 1) * batch_size + numbers))
    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=READ_AHEAD)
    return iter(made.to_iter_dataset(options))


def read(rows: Any, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of these rising numbers, a stretch without gaps at a time."""
    stretches = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    parts = [rows.batch(int(part[0]), len(part)) for part in stretches]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
