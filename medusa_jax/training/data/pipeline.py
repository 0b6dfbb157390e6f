"""The input pipeline: the batch of each step, prefetched by Grain's threads."""

from collections.abc import Iterator

import numpy as np

from medusa_jax.training.data.rows import Rows

# Number of prefetched batches and of threads.
READ_AHEAD, THREADS = 4, 2


def batches(
    rows: Rows,
    batch_size: int,
    first_step: int,
    last_step: int,
    local: np.ndarray | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """This process's rows of the batch of every step, in order.

    A batch is a pure function of its step number: step n has the rows from (n - 1) batch_size on, and every
    process reads those of its devices. So a resumed run needs no iterator state.

    Args:
      first_step, last_step: 1-based, both included.
      local: indices, ascending, of the batch's rows that this process reads; None: all.
    """
    import grain  # importing takes a second

    numbers = np.arange(batch_size) if local is None else local
    steps = grain.MapDataset.range(first_step, last_step + 1)
    dataset = steps.map(lambda step: read(rows, (step - 1) * batch_size + numbers))
    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=READ_AHEAD)
    return iter(dataset.to_iter_dataset(options))


def read(rows: Rows, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """The rows with these ascending numbers, one contiguous range at a time."""
    ranges = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    batches = [rows.batch(int(r[0]), len(r)) for r in ranges]
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
