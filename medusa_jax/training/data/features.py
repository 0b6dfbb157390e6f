"""`data.cache_features`: hidden states of a frozen backbone, computed once, then read from disk.

Heads on a frozen backbone read the same hidden states in every epoch. With a cache, training steps have no
backbone pass. The cache takes rows x seq_len x d_model values on disk (a 7B Llama: 16 MiB per row of 2048 tokens
in bfloat16), times 1 + A for heads that read A more layers (`Drafter.taps`); its size is printed before anything
is written, and `hidden_store.py` has the storage formats. The content of rows does not depend on `data.seed`, so
runs with different seeds, heads or losses share the files, in `data.features_path/<digest>/` (default:
`<workdir>/features/<digest>/`):

    hidden_00000.npy ...    [rows of the shard, seq_len, `stored_width`]; bfloat16 as its bits (uint16)
    crc32_00000.npy ...     [rows of the shard], checked when a row is first read

A shard is complete or absent, so a killed run resumes with the next one. If several runs need the same files, one
writes them and the others wait. The processes of a run compute the rows of their devices; process 0 writes.
"""

import collections
import dataclasses
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from medusa_jax import hosts
from medusa_jax.config import Config
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.sharding import PyTree, local_rows
from medusa_jax.training.data.given_states import GivenRows
from medusa_jax.training.data.rows import Rows, TokenRows
from medusa_jax.training.hidden_store import STORED, encode, stored_width
from medusa_jax.training.log.progress import Progress
from medusa_jax.training.partition import heads_taps, hidden_width
from medusa_jax.whole_files import read_array, replacing, write_array

# (frozen variables, batch of [B, T] arrays) -> hidden states [B, T, E].
Hidden = Callable[[PyTree, PyTree], jax.Array]

SHARD_BYTES = 256 * 2**20
# Disk space left free for checkpoints.
SPARE_BYTES = 2**30


class Shard(NamedTuple):
    """An open file of rows; `crc` is None for files of earlier versions."""

    hidden: np.ndarray
    crc: np.ndarray | None
    checked: np.ndarray


class CachedRows(Rows):
    """`TokenRows` whose batches also hold `hidden` [B, T, W]; rows in the same order.

    Attributes:
      rows: number of rows, at most that of the `TokenRows`.
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
        """Shape of the array in the file of a shard."""
        return (min(self.shard_rows, self.rows - shard * self.shard_rows), *self.shape)

    @property
    def shards(self) -> range:
        """Shard s holds rows s * shard_rows and on."""
        return range(-(-self.rows // self.shard_rows))

    @property
    def missing(self) -> list[int]:
        """Shards without a file."""
        return [s for s in self.shards if not os.path.exists(self.path(s))]

    def counts(self, vocab_size: int) -> np.ndarray:
        return self.source.counts(vocab_size)

    def row(self, number: int, epoch: int = 0) -> dict[str, np.ndarray]:
        """`TokenRows.row` with the row's hidden states."""
        return self.source.row(number, epoch) | {"hidden": self._hidden(number)}

    def _hidden(self, number: int) -> np.ndarray:
        shard, inside = divmod(number, self.shard_rows)
        if shard not in self._open:
            self._open[shard] = self._opened(shard)
        hidden, crc, checked = self._open[shard]
        row = np.asarray(hidden[inside])
        # Once per row, at 3 GiB/s: a third of a millisecond for 1 MB.
        if crc is not None and not checked[inside]:
            if crc[inside] != zlib.crc32(row.data):
                raise UserError(
                    f"{self.path(shard)} is damaged (the checksum of row {inside} differs): "
                    "delete it and start again"
                )
            checked[inside] = True
        return row.view(jnp.bfloat16) if self.kind == "bfloat16" else row

    def _opened(self, shard: int) -> Shard:
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

    def write(self, shard: int, batches: Iterable[np.ndarray]) -> None:
        """One file from arrays [rows, T, W] that hold its rows and no less, whole or not at all.

        Not through a memory map, where a full disk kills the process.
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
            # Before the rows: a kill in between must not leave rows without checksums.
            write_array(self.path(shard, "crc32"), np.array(crc, np.uint32))


def cached(
    cfg: Config, mesh: Mesh, rows: TokenRows, hidden: Hidden, frozen: PyTree, fingerprint: str,
    limit: int | None = None,
) -> Rows:  # fmt: skip
    """Rows with hidden states; computes those that are neither given nor on disk.

    Args:
      limit: use only the first `limit` rows (of text that is not shuffled).
      fingerprint: of the backbone (`interop.hf.fingerprint`).

    Raises:
      UserError: the disk is too small; gives the required size.
    """
    if rows.states:
        norm_D = np.asarray(hosts.on_host(frozen["backbone"]["norm"]["scale"]), np.float32)
        return GivenRows(rows, norm_D, cfg.model.arch.rms_eps, hidden_width(cfg))
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
    waiting = f"hidden states: another run is writing {directory}, waiting for it"
    with hosts.locked(directory, waiting):
        missing = _missing(found)  # another run may have written them
        if missing:
            if hosts.first():
                announce(found, missing)
            size = cfg.train.batch_size // cfg.train.accumulation
            encoded = jax.jit(lambda *given: encode(kind, hidden(*given), D))
            compute(found, missing, mesh, size, encoded, frozen)
    multihost_utils.sync_global_devices(f"hidden states {digest}")  # the last file exists
    return found


def _missing(found: CachedRows) -> list[int]:
    """Shards without a file, as seen by process 0."""
    absent = np.isin(found.shards, found.missing)
    return np.flatnonzero(hosts.broadcast_from_first(absent)).tolist()


def key_of(cfg: Config, rows: TokenRows, fingerprint: str) -> list[object]:
    """Everything that the hidden states depend on; the text by its content."""
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
    present = f", {done} of {len(found.shards)} files are there" if done else ""
    inform(
        f"hidden states: {found.rows} rows x {T} x {W} in {found.kind} = "
        f"{found.bytes / 2**30:.2f} GiB in {found.directory} ({free / 2**30:.1f} GiB "
        f"free{present})"
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
    encoded: Hidden,
    frozen: PyTree,
) -> None:
    """Run the backbone over the rows of the missing shards, `batch_rows` at a time."""
    from medusa_jax.training.step import microbatches

    names = ("tokens", "positions", "segment_ids")
    local = local_rows(mesh, batch_rows)
    done = (len(found.shards) - len(missing)) * found.shard_rows
    with Progress("hidden states", found.rows, "row", done, hosts.first()) as bar:

        def batches(shard: int) -> Iterator[np.ndarray]:
            first = shard * found.shard_rows
            end = min(first + found.shard_rows, found.rows)
            for at in range(first, end, batch_rows):
                numbers = np.minimum(at + local, found.rows - 1)
                rows = [found.source.row(int(i)) for i in numbers]
                batch = {name: np.stack([row[name] for row in rows]) for name in names}
                placed = jax.tree.map(lambda x: x[0], microbatches(mesh, batch, 1))
                yield hosts.on_host(encoded(frozen, placed))
                bar.update(min(batch_rows, end - at))

        for shard in missing:
            if hosts.first():
                found.write(shard, batches(shard))
            else:
                collections.deque(batches(shard), maxlen=0)
