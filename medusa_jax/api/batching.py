"""Many requests in batches of one compiled size."""

from collections.abc import Iterator


def equal_batches(n: int, size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Numbers 0, ..., n - 1 in batches, and each batch padded to `size` with its last number.

    If n < `size`, there is one batch of size n.

    Example: 5 in batches of 2: ([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4], [4, 4]).
    """
    size = min(size, n)
    for start in range(0, n, size):
        ids = list(range(start, min(start + size, n)))
        yield ids, ids + [ids[-1]] * (size - len(ids))
