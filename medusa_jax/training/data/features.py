"""`data.cache_features`: hidden states of a frozen backbone, computed once, then read from disk.

Heads on a frozen backbone only ever see its last hidden states, and every epoch the same ones.
Cached, a training step has no backbone pass at all. The price is disk: rows x seq_len x d_model
values (a 7B Llama: 16 MiB per row of 2048 tokens in bfloat16), times 1 + A for heads that read A more
layers (`Drafter.taps`), announced before anything is written; `hidden_store.py` says how they are stored. What is in a row does not depend on `data.seed`, which orders them, so that runs that
differ in seeds, heads or loss share the files. They lie under `data.features_path/<digest>/`
(default: `<workdir>/features/<digest>/`):

    hidden_00000.npy ...    [rows of the shard, seq_len, `stored_width`]; bfloat16 as its bits (uint16)
    crc32_00000.npy ...     [rows of the shard], checked when a row is read for the first time

A shard is complete or not there, so a run that was killed goes on with the next one. Of several
runs at a time that need the same files one writes them; the others wait. The processes of one run
compute the rows of their devices, and process 0 writes them.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from medusa_jax import hosts
from medusa_jax.config import Config
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.sharding import PyTree, own_rows
from medusa_jax.training.data.rows import Rows, TokenRows
from medusa_jax.training.hidden_store import STORED, encode, stored_width
from medusa_jax.training.partition import heads_taps, hidden_width
from medusa_jax.whole_files import read_array, replacing, write_array

# (frozen variables, batch of [B, T] arrays) -> hidden states [B, T, E].
Hidden = Callable[[PyTree, PyTree], jax.Array]

SHARD_BYTES = 256 * 2**20
# Disk that is left alone: checkpoints have to fit too.
SPARE_BYTES = 2**30


class Shard(NamedTuple):
    """An open file of rows; checksums of its rows, unless an earlier version wrote it."""

    hidden: np.ndarray
    crc: np.ndarray | None
    checked: np.ndarray


class CachedRows(Rows):
    """`TokenRows` whose batches also hold `hidden` [B, T, W]; rows in the same order.

    Attributes:
      rows: number of rows, as of the `TokenRows` or fewer (held-out text).
      shard_rows: rows per file.
      shape: [T, W] of a row, with W as `stored_width`.
    """

    def __init__(self, source: TokenRows, rows: int, directory: str, width: int, kind: str):
        super().__init__(source.cfg, source.shuffle)
        self.source, self.rows, self.directory, self.kind = source, rows, directory, kind
        self.crc = source.crc
        self.shape = (source.cfg.seq_len, width)
        self.stored = STORED[kind]
        row_bytes = self.shape[0] * width * np.dtype(self.stored).itemsize
        self.shard_rows = max(1, min(self.rows, SHARD_BYTES // row_bytes))
        self.bytes = self.rows * row_bytes
        self._open: dict[int, Shard] = {}

    def path(self, shard: int, kind: str = "hidden") -> str:
        return os.path.join(self.directory, f"{kind}_{shard:05d}.npy")

    def shape_of(self, shard: int) -> tuple[int, int, int]:
        """Of the array in the file of a shard."""
        return (min(self.shard_rows, self.rows - shard * self.shard_rows), *self.shape)

    @property
    def shards(self) -> range:
        """Shard s holds rows s * shard_rows and on."""
        return range(-(-self.rows // self.shard_rows))

    @property
    def missing(self) -> list[int]:
        """Shards that are still to be computed."""
        return [s for s in self.shards if not os.path.exists(self.path(s))]

    def counts(self, vocab_size: int) -> np.ndarray:
        return self.source.counts(vocab_size)

    def row(self, number: int, epoch: int = 0) -> dict[str, np.ndarray]:
        """As `TokenRows.row`, with the row's hidden states."""
        return self.source.row(number, epoch) | {"hidden": self._hidden(number)}

    def _hidden(self, number: int) -> np.ndarray:
        shard, inside = divmod(number, self.shard_rows)
        if shard not in self._open:
            self._open[shard] = self._opened(shard)
        hidden, crc, checked = self._open[shard]
        row = np.asarray(hidden[inside])
        # 3 GiB/s: a third of a millisecond for a row of 1 MB, once, when it is read in any case.
        if crc is not None and not checked[inside]:
            if crc[inside] != zlib.crc32(row.data):
                raise UserError(
                    f"{self.path(shard)} is damaged (the checksum of row {inside} differs): "
                    "delete it and start again"
                )
            checked[inside] = True
        return row.view(jnp.bfloat16) if self.kind == "bfloat16" else row

    def _opened(self, shard: int) -> "Shard":
        path, sums = self.path(shard), self.path(shard, "crc32")
        try:
            hidden = read_array(path, "r")
            crc = read_array(sums) if os.path.exists(sums) else None
        except UserError as error:
            raise UserError(f"{error}; delete {path} and start again") from error
        shape = self.shape_of(shard)
        for array, dtype, dims in ((hidden, self.stored, 3), (crc, "uint32", 1)):
            if array is not None and (array.dtype, array.shape) != (dtype, shape[:dims]):
                raise UserError(
                    f"{path} or its checksums hold {array.dtype}{list(array.shape)}, not {dtype}"
                    f"{list(shape[:dims])}; delete {path} and start again"
                )
        return Shard(hidden, crc, np.zeros(len(hidden), bool))

    def write(self, shard: int, batches: Any) -> None:
        """One file from arrays [rows, T, W] that hold its rows and no less, whole or not at all.

        Written as a file is, not through a map of it into memory, where a full disk ends the process.
        """
        shape = self.shape_of(shard)
        header = {
            "descr": np.dtype(self.stored).str,
            "fortran_order": False,
            "shape": shape,
        }
        crc: list[int] = []
        with replacing(self.path(shard)) as new:
            with open(new, "wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for hidden in batches:
                    for row in hidden[: shape[0] - len(crc)]:
                        row = np.ascontiguousarray(row).view(self.stored)
                        crc.append(zlib.crc32(row.data))
                        file.write(row.data)
            assert len(crc) == shape[0]
            # In place before the rows are: a kill in between leaves checksums of no file.
            write_array(self.path(shard, "crc32"), np.array(crc, np.uint32))


def check(cfg: Config) -> None:
    """Refuses what cannot be cached.

    Raises:
      UserError: names the field that stands against it.
    """
    kind = cfg.data.cache_features
    if not kind:
        return
    if kind not in STORED:
        raise UserError(
            f"data.cache_features is {', '.join(STORED)} or empty, not {kind!r}"
        )
    if cfg.train.stage != "medusa1":
        raise UserError(
            f"data.cache_features needs a backbone that does not change: train.stage medusa1, "
            f"not {cfg.train.stage}"
        )
    if cfg.data.packing != "first_fit":
        raise UserError(
            "data.cache_features needs data.packing first_fit: 'concat' cuts the text at other "
            "places in every epoch"
        )


def cached(
    cfg: Config, mesh: Mesh, rows: TokenRows, hidden: Hidden, frozen: PyTree, fingerprint: str,
    limit: int | None = None,
) -> CachedRows:  # fmt: skip
    """Rows with hidden states, computing what is not on disk yet.

    Args:
      limit: only the first so many rows; for text that is not shuffled.
      fingerprint: of the backbone as it was read (`interop.hf.fingerprint`).

    Raises:
      UserError: the disk is too small; says how much is needed.
    """
    count = min(rows.rows, limit or rows.rows)
    cfg_bytes = json.dumps([*key_of(cfg, rows, fingerprint), count]).encode()
    digest = hashlib.sha256(cfg_bytes).hexdigest()[:12]
    home = cfg.data.features_path or os.path.join(cfg.workdir, "features")
    directory = os.path.join(home, digest)
    kind, D = cfg.data.cache_features, cfg.model.arch.d_model
    found = CachedRows(
        rows, count, directory, stored_width(kind, D, hidden_width(cfg)), kind
    )
    if not _missing(found):
        if hosts.first():
            inform(f"hidden states: {found.bytes / 2**30:.2f} GiB read from {directory}")
        return found
    os.makedirs(directory, exist_ok=True)
    with exclusive(directory) if hosts.first() else contextlib.nullcontext():
        missing = _missing(found)  # another run may have written them meanwhile
        if missing:
            if hosts.first():
                announce(found, missing)
            size = cfg.train.batch_size // cfg.train.accumulation
            encoded = jax.jit(lambda *given: encode(kind, hidden(*given), D))
            compute(found, missing, mesh, size, encoded, frozen)
    multihost_utils.sync_global_devices(f"hidden states {digest}")  # the last file is there
    return found


def _missing(found: CachedRows) -> list[int]:
    """Shards that are still to be computed, as process 0 sees the directory."""
    absent = np.isin(found.shards, found.missing)
    return np.flatnonzero(hosts.of_first(absent)).tolist()


@contextlib.contextmanager
def exclusive(directory: str) -> Iterator[None]:
    """One process at a time; the lock ends with its process, however that ends."""
    from filelock import FileLock, Timeout

    lock = FileLock(directory + ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        inform(f"hidden states: another run is writing {directory}, waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def key_of(cfg: Config, rows: TokenRows, fingerprint: str) -> list[Any]:
    """Everything that the hidden states depend on; the text by content, wherever it lies."""
    text = hashlib.sha256()
    for array in (rows.tokens, rows.starts):
        text.update(np.ascontiguousarray(array).data)
    data = rows.cfg
    return [
        text.hexdigest(), data.seq_len,
        data.packing, data.cache_features, cfg.train.dtype,
        dataclasses.asdict(cfg.model), fingerprint,
        *([heads_taps(cfg)] if heads_taps(cfg) else []),
    ]  # fmt: skip


def announce(found: CachedRows, missing: list[int]) -> None:
    """Say what will be written, before it is; refuse if the disk cannot hold it."""
    T, W = found.shape
    need = found.bytes * len(missing) // len(found.shards)
    free = shutil.disk_usage(found.directory).free
    done = len(found.shards) - len(missing)
    there = f", {done} of {len(found.shards)} files are there" if done else ""
    inform(
        f"hidden states: {found.rows} rows x {T} x {W} in {found.kind} = "
        f"{found.bytes / 2**30:.2f} GiB in {found.directory} ({free / 2**30:.1f} GiB "
        f"free{there})"
    )
    if need + SPARE_BYTES > free:
        raise UserError(
            f"data.cache_features needs {need / 2**30:.1f} GiB in {found.directory}, where "
            f"{free / 2**30:.1f} GiB are free: use fewer bits, fewer samples "
            "(data.max_samples), another data.features_path, or no cache"
        )


def compute(
    found: CachedRows,
    missing: list[int],
    mesh: Mesh,
    batch_rows: int,
    encoded: Any,
    frozen: PyTree,
) -> None:
    """Run the backbone over the rows of the missing shards, `batch_rows` at a time."""
    from tqdm import tqdm

    from medusa_jax.training.step import microbatches

    names = ("tokens", "positions", "segment_ids")
    told = time.monotonic()
    own, shown = own_rows(mesh, batch_rows), hosts.first()
    bar = tqdm(
        total=found.rows, unit="row", desc="hidden states", disable=None if shown else True
    )
    with bar:
        bar.update((len(found.shards) - len(missing)) * found.shard_rows)

        def batches(shard: int) -> Any:
            first = shard * found.shard_rows
            end = min(first + found.shard_rows, found.rows)
            for at in range(first, end, batch_rows):
                numbers = np.minimum(at + own, found.rows - 1)
                rows = [found.source.row(int(i)) for i in numbers]
                batch = {name: np.stack([row[name] for row in rows]) for name in names}
                placed = jax.tree.map(lambda x: x[0], microbatches(mesh, batch, 1))
                yield hosts.on_host(encoded(frozen, placed))
                bar.update(min(batch_rows, end - at))

        for i, shard in enumerate(missing, start=1):
            if hosts.first():
                found.write(shard, batches(shard))
            else:
                collections.deque(batches(shard), maxlen=0)
            if shown and bar.disable and time.monotonic() - told > 60:
                told = time.monotonic()
                inform(f"hidden states: {i} of {len(missing)} files written")
