"""`data.cache_features`: hidden states of a frozen backbone, computed once, then read from disk.

Heads on a frozen backbone only ever see its last hidden states, and every epoch the same ones.
Cached, a training step has no backbone pass at all. The price is disk: rows x seq_len x d_model
values (a 7B Llama: 16 MiB per row of 2048 tokens in bfloat16), announced before anything is
written. What is in a row does not depend on `data.seed`, which orders them, so that runs that
differ in seeds, heads or loss share the files. They lie under `data.features_path/<digest>/`
(default: `<workdir>/features/<digest>/`):

    hidden_00000.npy ...    [rows of the shard, seq_len, d_model]; bfloat16 as its bits (uint16)

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
from collections.abc import Callable, Iterator
from typing import Any

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
from medusa_jax.whole_files import replacing

# (frozen variables, batch of [B, T] arrays) -> hidden states [B, T, D].
Hidden = Callable[[PyTree, PyTree], jax.Array]

SHARD_BYTES = 256 * 2**20
# Disk that is left alone: checkpoints have to fit too.
SPARE_BYTES = 2**30
KINDS = ("float32", "bfloat16")


class CachedRows(Rows):
    """`TokenRows` whose batches also hold `hidden` [B, T, D]; rows in the same order.

    Attributes:
      rows: number of rows, as of the `TokenRows` or fewer (held-out text).
      shard_rows: rows per file.
    """

    def __init__(
        self, source: TokenRows, rows: int, directory: str, d_model: int, kind: str
    ):
        super().__init__(source.cfg, source.shuffle)
        self.source, self.rows, self.directory, self.kind = source, rows, directory, kind
        self.shape = (source.cfg.seq_len, d_model)
        row_bytes = self.shape[0] * d_model * np.dtype(jnp.dtype(kind)).itemsize
        self.shard_rows = max(1, min(self.rows, SHARD_BYTES // row_bytes))
        self.bytes = self.rows * row_bytes
        self._open: dict[int, np.ndarray] = {}

    def path(self, shard: int) -> str:
        return os.path.join(self.directory, f"hidden_{shard:05d}.npy")

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
            try:
                stored = np.load(self.path(shard), mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"{self.path(shard)} cannot be read ({error}): delete it and start again"
                ) from error
            self._open[shard] = stored
        row = np.asarray(self._open[shard][inside])
        return row.view(jnp.bfloat16) if self.kind == "bfloat16" else row

    def write(self, shard: int, batches: Any) -> None:
        """One file from arrays [rows, T, D] that hold its rows and no less, whole or not at all."""
        first = shard * self.shard_rows
        count = min(self.shard_rows, self.rows - first)
        stored = "uint16" if self.kind == "bfloat16" else "float32"
        with replacing(self.path(shard)) as new:
            out = np.lib.format.open_memmap(new, "w+", stored, (count, *self.shape))
            at = 0
            for hidden in batches:
                hidden = hidden[: count - at]
                out[at : at + len(hidden)] = hidden.view(stored)
                at += len(hidden)
            assert at == count
            out.flush()


def check(cfg: Config) -> None:
    """Refuses what cannot be cached.

    Raises:
      UserError: names the field that stands against it.
    """
    kind = cfg.data.cache_features
    if not kind:
        return
    if kind not in KINDS:
        raise UserError(
            f"data.cache_features is {' or '.join(KINDS)} or empty, not {kind!r}"
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
    found = CachedRows(
        rows, count, directory, cfg.model.arch.d_model, cfg.data.cache_features
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
            compute(found, missing, mesh, size, jax.jit(hidden), frozen)
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
    ]  # fmt: skip


def announce(found: CachedRows, missing: list[int]) -> None:
    """Say what will be written, before it is; refuse if the disk cannot hold it."""
    T, D = found.shape
    need = found.bytes * len(missing) // len(found.shards)
    free = shutil.disk_usage(found.directory).free
    done = len(found.shards) - len(missing)
    there = f", {done} of {len(found.shards)} files are there" if done else ""
    inform(
        f"hidden states: {found.rows} rows x {T} x {D} in {found.kind} = "
        f"{found.bytes / 2**30:.2f} GiB in {found.directory} ({free / 2**30:.1f} GiB "
        f"free{there})"
    )
    if need + SPARE_BYTES > free:
        raise UserError(
            f"data.cache_features needs {need / 2**30:.1f} GiB in {found.directory}, where "
            f"{free / 2**30:.1f} GiB are free: use bfloat16, fewer samples "
            "(data.max_samples), another data.features_path, or no cache"
        )


def compute(
    found: CachedRows,
    missing: list[int],
    mesh: Mesh,
    batch_rows: int,
    hidden: Any,
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
                yield hosts.on_host(hidden(frozen, placed).astype(found.kind))
                bar.update(min(batch_rows, end - at))

        for i, shard in enumerate(missing, start=1):
            if hosts.first():
                found.write(shard, batches(shard))
            else:
                collections.deque(batches(shard), maxlen=0)
            if shown and bar.disable and time.monotonic() - told > 60:
                told = time.monotonic()
                inform(f"hidden states: {i} of {len(missing)} files written")
