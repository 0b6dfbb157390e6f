"""Rows of tokens for training, from a token directory.

Every source becomes a token directory before training starts:

    tokens.npy       1-D uint16 or int32, all samples one after another
    doc_starts.npy   1-D int64, where each sample begins (optional: one single sample)
    counted.npy      1-D bool, which tokens are targets (optional: all)
    report.json      a report (optional)

The arrays are memory-mapped. Rows are a pure function of the configuration and their number, so the position in
the data is the number of steps made, and resuming needs nothing else.
"""

import abc
import itertools
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from medusa_jax.config import DataConfig
from medusa_jax.errors import UserError
from medusa_jax.whole_files import checksum, read_array, write_array

ARRAYS = ("tokens.npy", "counted.npy", "doc_starts.npy")
# The arrays of a row and their types.
ROW = {"tokens": "int32", "positions": "int32", "segment_ids": "int32", "counted": "bool"}
# Rows that first-fit packing keeps open at once.
OPEN_ROWS = 64
# Number of batches that Grain reads ahead, and of its threads.
READ_AHEAD, THREADS = 4, 2


class Rows(abc.ABC):
    """Packed rows of `seq_len` tokens, reshuffled in every epoch.

    A batch is a dict of [B, T] arrays: `tokens` int32, `positions` int32 (from 0 in every
    segment), `segment_ids` int32 (1, 2, ... in a row; 0 is padding), `counted` bool.

    Attributes:
      rows: number of rows in an epoch.
      crc: checksum of the text.
    """

    rows: int
    crc: int

    def __init__(self, cfg: DataConfig, shuffle: bool):
        self.cfg, self.shuffle = cfg, shuffle
        self._orders: dict[int, np.ndarray] = {}

    @abc.abstractmethod
    def row(self, number: int, epoch: int = 0) -> dict[str, np.ndarray]:
        """Row `number` before shuffling: [T] arrays."""

    def batch(self, numbers: Iterable[int]) -> dict[str, np.ndarray]:
        """The rows with these numbers, which count through all epochs."""
        rows = [self._shuffled_row(*divmod(int(i), self.rows)) for i in numbers]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _shuffled_row(self, epoch: int, i: int) -> dict[str, np.ndarray]:
        order = self._orders.get(epoch)
        if order is None:  # several threads may compute it, with the same result
            rng = np.random.default_rng((self.cfg.seed, epoch))
            order = rng.permutation(self.rows) if self.shuffle else np.arange(self.rows)
            self._orders = dict(list(self._orders.items())[-1:]) | {epoch: order}
        return self.row(int(order[i]), epoch)


class MixedRows(Rows):
    """Rows of several texts shuffled together; each text is packed separately.

    Adding a text therefore does not change the rows of the others. Without shuffling, texts alternate, so an
    evaluation of the first rows sees all of them.

    Example: texts of 3 and 2 rows: rows 0 to 2 are the first text's. Not shuffled, rows 0, 2 and 4 are.
    """

    def __init__(self, texts: Sequence[Rows]):
        super().__init__(texts[0].cfg, texts[0].shuffle)
        self.texts = texts
        self.firsts = np.cumsum([0, *(text.rows for text in texts)])
        self.rows = int(self.firsts[-1])
        row_numbers = np.concatenate([np.arange(text.rows) for text in texts])
        self.turns = np.argsort(row_numbers, kind="stable")
        self.crc = zlib.crc32(repr([text.crc for text in texts]).encode())

    def row(self, number: int, epoch: int = 0) -> dict[str, np.ndarray]:
        number = number if self.shuffle else int(self.turns[number])
        i = int(np.searchsorted(self.firsts, number, side="right")) - 1
        return self.texts[i].row(number - int(self.firsts[i]), epoch)


def mix(texts: Sequence[Rows]) -> Rows:
    """The rows of all texts."""
    return MixedRows(texts) if len(texts) > 1 else texts[0]


class TokenRows(Rows):
    """Rows of one text, packed from a token directory.

    Attributes:
      part: "train" and "held out" divide the samples by `DataConfig.held_out`; "" has all.
      lengths: number of tokens that rows contain of each sample.
      beyond: "5 of 90" if 5 targets of all parts are after `seq_len` tokens of their sample, "" if none is.
    """

    def __init__(
        self, directory: str, cfg: DataConfig, vocab_size: int, shuffle: bool = True,
        part: str = "",
    ):  # fmt: skip
        """Open the arrays and pack the rows.

        Raises:
          UserError: arrays are missing, inconsistent or exceed the vocabulary.
        """
        super().__init__(cfg, shuffle)
        self.directory, self.part = directory, part
        self.tokens, self.counted, self.starts, self.crc = token_arrays(directory)
        size = self.tokens.size
        if int(self.tokens.max()) >= vocab_size or int(self.tokens.min()) < 0:
            raise UserError(
                f"{directory}/tokens.npy has token ids up to {int(self.tokens.max())}, but the "
                f"model's vocabulary has {vocab_size}: prepare it with the model's tokenizer"
            )
        self.lengths = np.diff(self.starts, append=size)
        self.beyond = ""
        if cfg.packing == "first_fit":
            total = self._targets().sum()
            self.lengths = np.minimum(self.lengths, cfg.seq_len)
            lost = total - self._targets().sum()
            self.beyond = f"{lost} of {total}" if lost else ""
            if part:
                is_held_out = held_out(self.starts.size, cfg.held_out)
                self.lengths[is_held_out if part == "train" else ~is_held_out] = 0
            # The same rows for every seed; `data.seed` only changes their order.
            order = np.random.default_rng(0).permutation(self.starts.size)
            self.packed = first_fit(self.lengths[order], cfg.seq_len, OPEN_ROWS)
            self.packed = [order[row] for row in self.packed]
            self.rows = len(self.packed)
        else:
            self.rows = max(size // cfg.seq_len - 1, 1)
        targets = self._targets()
        targets[self.starts[self.starts < size]] = False  # nothing predicts a first token
        self.rows = self.rows if targets.any() else 0

    def counts(self, vocab_size: int) -> np.ndarray:
        """Number of times that each token is a target: [V]."""
        return np.bincount(self.tokens[self._targets()], minlength=vocab_size)

    def _targets(self) -> np.ndarray:
        """Which tokens are targets and within `lengths`: [size] bool."""
        left = np.diff(self.starts, append=self.tokens.size) - self.lengths
        runs = np.stack([self.lengths, left], axis=1)
        inside = np.repeat(np.tile([True, False], len(runs)), runs.ravel())
        return inside & (self.counted != 0)

    def row(self, number: int, epoch: int = 0) -> dict[str, np.ndarray]:
        """Row `number`; with "concat" packing each epoch cuts the text elsewhere."""
        if self.cfg.packing == "first_fit":
            documents = self.packed[number]
            return self._assemble(
                [(self.starts[d], self.starts[d] + self.lengths[d]) for d in documents]
            )
        T = self.cfg.seq_len
        slack = max(self.tokens.size - self.rows * T, 0)
        phase = np.random.default_rng((self.cfg.seed, epoch, 1)).integers(
            min(slack, T - 1) + 1
        )
        begin = number * T + (int(phase) if self.shuffle else 0)
        end = min(begin + T, self.tokens.size)
        low, high = np.searchsorted(self.starts, [begin + 1, end])
        inner = self.starts[low:high]
        edges = np.unique([begin, *inner, end])
        return self._assemble(list(itertools.pairwise(edges)))

    def _assemble(self, spans: list[tuple[int, int]]) -> dict[str, np.ndarray]:
        T = self.cfg.seq_len
        row = {name: np.zeros(T, kind) for name, kind in ROW.items()}
        filled = 0
        for segment, (begin, end) in enumerate(spans, start=1):
            place = slice(filled, filled + int(end - begin))
            row["tokens"][place] = self.tokens[begin:end]
            row["positions"][place] = np.arange(end - begin)
            row["segment_ids"][place] = segment
            row["counted"][place] = self.counted[begin:end]
            filled = place.stop
        return row


def held_out(n: int, share: float) -> np.ndarray:
    """Which of n samples are held out, evenly spread: [n] bool; of several at least one, never all.

    Example: 6 samples and a share of 1/3: the second and the fifth.
    """
    mask, count = np.zeros(n, bool), min(math.ceil(share * n), n - 1)
    mask[(2 * np.arange(count) + 1) * n // (2 * max(count, 1))] = True
    return mask


def first_fit(lengths: np.ndarray, capacity: int, open_rows: int) -> list[np.ndarray]:
    """Sample numbers per row: each sample goes whole into the first open row with room.

    When none has room, a new row is opened and the fullest one beyond `open_rows` is closed.

    Example: lengths 5 3 4 2, capacity 8 -> rows [0, 1], [2, 3].
    """
    full_rows: list[np.ndarray] = []
    rows: list[list[int]] = []
    room: list[int] = []
    for i, length in enumerate(lengths.tolist()):
        if not 0 < length <= capacity:
            continue
        j = next((j for j, space in enumerate(room) if space >= length), len(rows))
        if j == len(rows):
            if j == open_rows:
                fullest = room.index(min(room))
                full_rows.append(np.array(rows.pop(fullest)))
                room.pop(fullest)
                j -= 1
            rows.append([])
            room.append(capacity)
        rows[j].append(i)
        room[j] -= length
    return full_rows + [np.array(row) for row in rows]


def token_arrays(directory: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Tokens, memory-mapped, which of them are targets, where samples begin, and the joint checksum of the files.

    Reads all of them once, at about 3 GiB/s.

    Raises:
      UserError: an array is missing, unreadable or inconsistent.
    """
    arrays, checksums = {}, {}
    for name in ARRAYS:
        path = os.path.join(directory, name)
        if not os.path.exists(path):
            continue
        arrays[name] = array = read_array(path, "r")
        if array.ndim != 1 or array.dtype.kind not in "iub":
            raise UserError(
                f"{path} holds {array.dtype}{list(array.shape)}, not whole numbers in one dimension"
            )
        checksums[name] = checksum(path)
    tokens = arrays.get("tokens.npy", np.zeros(0, np.int32))
    size, starts = tokens.size, arrays.get("doc_starts.npy", np.zeros(1))
    if not size:
        raise UserError(f"{directory} has no tokens.npy with at least one token")
    counted = arrays.get("counted.npy", np.broadcast_to(np.True_, size))
    if counted.size != size or not np.isin(counted, (0, 1)).all():
        raise UserError(f"{directory}/counted.npy should have {size} values, 1 or 0")
    edges = np.append(starts, size)
    if edges[0] != 0 or np.any(np.diff(edges) < 0):
        raise UserError(f"{directory}/doc_starts.npy must rise from 0 to at most {size}")
    crc = zlib.crc32(repr(checksums).encode())
    return tokens, counted, np.asarray(starts, np.int64), crc


def write_tokens(
    directory: str | Path,
    samples: Sequence[np.ndarray],
    counted: Sequence[np.ndarray] | None = None,
) -> None:
    """Write the arrays of a token directory: samples one after another.

    Args:
      counted: which tokens of each sample are targets; None: all, without a file.
    """
    starts = np.cumsum([0, *(len(sample) for sample in samples[:-1])], dtype=np.int64)
    arrays = {"tokens.npy": np.concatenate(samples), "doc_starts.npy": starts}
    if counted is not None:
        arrays["counted.npy"] = np.concatenate(counted)
    for name, array in arrays.items():
        write_array(os.path.join(directory, name), array)


def batches(
    rows: Rows, batch_size: int, first_step: int, last_step: int,
    local: np.ndarray | None = None,
) -> Iterator[dict[str, np.ndarray]]:  # fmt: skip
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
    dataset = steps.map(lambda step: rows.batch((step - 1) * batch_size + numbers))
    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=READ_AHEAD)
    return iter(dataset.to_iter_dataset(options))
