"""The input pipeline: batches by the number of their step, read ahead in threads by Grain."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

# Batches that are ready before they are asked for, and the threads that make them.
READ_AHEAD, THREADS = 4, 2


def batches(
    rows: Any, batch_size: int, first_step: int, last_step: int
) -> Iterator[dict[str, np.ndarray]]:
    """This process's share of the batch of every step, in order.

    What a step reads is a pure function of its number: step n has rows number
    (n - 1) batch_size and on, of which every process takes its own stretch. So a resumed run
    needs no iterator state, and nothing but time depends on the reading ahead.

    Args:
      rows: `TokenRows`, or rows with cached features; `rows.batch(first, n)` gives n of them.
      first_step, last_step: 1-based, both included.
    """
    import grain  # takes a second, and only training reads rows

    share = batch_size // jax.process_count()
    own = share * jax.process_index()
    steps = grain.MapDataset.range(first_step, last_step + 1)
    made = steps.map(lambda step: rows.batch((step - 1) * batch_size + own, share))
    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=READ_AHEAD)
    return iter(made.to_iter_dataset(options))
