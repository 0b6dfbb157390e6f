"""`data.cache_features`: hidden states of a frozen backbone, computed once, then read from disk.

Heads on a frozen backbone read the same hidden states in every epoch. With a cache, training steps have no
backbone pass. The cache takes rows x seq_len x d_model values on disk (a 7B Llama: 16 MiB per row of 2048 tokens
in bfloat16), times 1 + A for heads that read A more layers (`Drafter.taps`); its size is printed before anything
is written, and `hidden_store.py` has the storage formats. The content of rows does not depend on `data.seed`, so
runs with different seeds, heads or losses share the files, in `data.features_path/<digest>/` (default:
`<workdir>/features/<digest>/`):

    hidden_00000.npy ...    [rows of the shard, seq_len, `stored_width`]; bfloat16 as its bits (uint16)

A shard is complete or absent, so a killed run resumes with the next one. If several runs need the same files, one
writes them and the others wait. The processes of a run compute the rows of their devices; process 0 writes.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from medusa_jax import hosts
from medusa_jax.config import DataConfig
from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.notation import byte_size
from medusa_jax.progress import ProgressBar
from medusa_jax.sharding import PyTree, local_rows
from medusa_jax.training.data.hidden_store import STORED, encode, stored_width
from medusa_jax.training.data.rows import Rows, TokenRows
from medusa_jax.training.losses import objectives
from medusa_jax.training.placement import microbatches
from medusa_jax.training.stage import Stage
from medusa_jax.whole_files import read_array, replacing

SHARD_BYTES = 256 * 2**20
# Files of a text that are open at a time.
OPEN_SHARDS = 256
# Disk space left free for checkpoints.
SPARE_BYTES = 2**30
# The arrays of a row that the backbone reads.
INPUTS = ("tokens", "positions", "segment_ids")


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
        self.stored = np.dtype(STORED[kind])
        row_bytes = self.shape[0] * width * self.stored.itemsize
        self.shard_rows = max(1, min(self.rows, SHARD_BYTES // row_bytes))
        self.bytes = self.rows * row_bytes
        # Shard s holds rows s * shard_rows and on.
        self.shards = range(-(-self.rows // self.shard_rows))
        # A memory map keeps its file open, and a process may open about a thousand.
        self._open = functools.lru_cache(OPEN_SHARDS)(self._open_shard)

    def path(self, shard: int) -> str:
        return os.path.join(self.directory, f"hidden_{shard:05d}.npy")

    def shape_of(self, shard: int) -> tuple[int, int, int]:
        """Shape of the array in the file of a shard."""
        return (min(self.shard_rows, self.rows - shard * self.shard_rows), *self.shape)

    @property
    def missing(self) -> list[int]:
        """Shards without a file, as seen by process 0."""
        is_missing = np.array([not os.path.exists(self.path(s)) for s in self.shards])
        return np.flatnonzero(hosts.broadcast_from_first(is_missing)).tolist()

    def row(self, number: int, epoch: int = 0) -> dict[str, np.ndarray]:
        """`TokenRows.row` with the row's hidden states."""
        shard, offset = divmod(number, self.shard_rows)
        row = np.asarray(self._open(shard)[offset])
        hidden = row.view(jnp.bfloat16) if self.kind == "bfloat16" else row
        return self.source.row(number, epoch) | {"hidden": hidden}

    def _open_shard(self, shard: int) -> np.ndarray:
        path, shape = self.path(shard), self.shape_of(shard)
        hidden = read_array(path, "r")
        if (hidden.dtype, hidden.shape) != (self.stored, shape):
            raise UserError(
                f"{path} is not {self.stored}{list(shape)}: delete it and start again"
            )
        return hidden

    def write(self, shard: int, batches: Iterable[np.ndarray]) -> None:
        """One file from arrays [rows, T, W] that hold at least its rows, complete or not at all.

        Not through a memory map, where a full disk kills the process.
        """
        shape = self.shape_of(shard)
        header = {"descr": self.stored.str, "fortran_order": False, "shape": shape}
        n_rows = shape[0]
        with replacing(self.path(shard)) as new, open(new, "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for hidden in batches:
                file.write(np.ascontiguousarray(hidden[:n_rows]).view(self.stored).data)
                n_rows -= len(hidden[:n_rows])
        assert not n_rows


@dataclasses.dataclass(frozen=True)
class Cache:
    """Makes and finds the hidden states of a run's texts.

    Attributes:
      workdir: has the directories, unless `data.features_path` is set.
      made_by: everything that the states depend on but the text, `data` and the stage's taps: the type of
        the computation, the model, its fingerprint (`files.fingerprint`).
    """

    data: DataConfig
    workdir: str
    made_by: list[object]
    stage: Stage
    frozen: PyTree
    mesh: Mesh

    def rows(self, text: TokenRows, size: int, limit: int | None = None) -> Rows:
        """The rows of a text with hidden states; computes those that are not on disk.

        Args:
          size: rows of a pass.
          limit: use only the first `limit` rows (of text that is not shuffled).

        Raises:
          UserError: the disk is too small; gives the required size.
        """
        count = min(text.rows, limit or text.rows)
        digest = hashlib.sha256(json.dumps([*self.key(text), count]).encode()).hexdigest()
        home = self.data.features_path or os.path.join(self.workdir, "features")
        directory = os.path.join(home, digest[:12])
        kind = self.data.cache_features
        D = self.stage.llama.config.d_model
        width = stored_width(kind, D, self.stage.width)
        cached = CachedRows(text, count, directory, width, kind)
        if not cached.missing:
            if hosts.first():
                inform(f"hidden states: {byte_size(cached.bytes)} read from {directory}")
            return cached
        notice = f"hidden states: another run is writing {directory}, waiting for it"
        with hosts.locked(directory, notice):
            missing = cached.missing  # another run may have written them
            if missing and hosts.first():
                announce(cached, missing)
            if missing:
                self.compute(cached, missing, size)
        multihost_utils.sync_global_devices(f"hidden states {digest}")
        return cached

    def key(self, text: TokenRows) -> list[object]:
        """Everything that the hidden states depend on; the text by its content."""
        content = hashlib.sha256()
        for array in (text.tokens, text.starts):
            content.update(np.ascontiguousarray(array).data)
        data, taps = self.data, self.stage.llama.taps
        key = [content.hexdigest(), data.seq_len, data.packing, data.cache_features]
        part = [text.part, data.held_out] if text.part else []
        return [*key, *self.made_by, *([taps] if taps else []), *part]

    def compute(self, cached: CachedRows, missing: list[int], size: int) -> None:
        """Run the backbone over the rows of the missing shards, `size` at a time."""
        start = (len(cached.shards) - len(missing)) * cached.shard_rows
        with ProgressBar("hidden states", cached.rows, "row", start, hosts.first()) as bar:
            for shard in missing:
                batches = self.states(cached, shard, size, bar)
                if hosts.first():
                    cached.write(shard, batches)
                else:
                    collections.deque(batches, maxlen=0)

    def states(
        self, cached: CachedRows, shard: int, size: int, bar: ProgressBar
    ) -> Iterator[np.ndarray]:
        """The hidden states of a shard's rows, as they are stored, `size` rows at a time."""
        local = local_rows(self.mesh, size)
        first = shard * cached.shard_rows
        end = min(first + cached.shard_rows, cached.rows)
        pending = None
        for at in range(first, end, size):
            numbers = np.minimum(at + local, cached.rows - 1)
            rows = [cached.source.row(int(i)) for i in numbers]
            batch = {name: np.stack([row[name] for row in rows]) for name in INPUTS}
            microbatch = jax.tree.map(lambda x: x[0], microbatches(self.mesh, batch, 1))
            with jax.set_mesh(self.mesh):  # attention is split over it
                states = self.encoded(self.frozen, microbatch)
            # The device computes this pass while the host writes the one before.
            if pending is not None:
                yield hosts.on_host(pending)
                bar.update(size)
            pending = states
        if pending is not None:
            yield hosts.on_host(pending)
            bar.update((end - first - 1) % size + 1)

    @functools.cached_property
    def encoded(self) -> Callable[[PyTree, PyTree], jax.Array]:
        """(frozen, batch) -> hidden states as they are stored."""
        kind, stage = self.data.cache_features, self.stage

        def run(frozen: PyTree, batch: PyTree) -> jax.Array:
            hidden_BTE = objectives.hidden_states(stage.backbone(frozen), batch)
            return encode(kind, hidden_BTE, stage.llama.config.d_model)

        return jax.jit(run)


def announce(cached: CachedRows, missing: list[int]) -> None:
    """Say what will be written, before it is; refuse if the disk cannot hold it."""
    T, W = cached.shape
    need = cached.bytes * len(missing) // len(cached.shards)
    free_bytes = shutil.disk_usage(cached.directory).free
    n_done = len(cached.shards) - len(missing)
    progress = f", {n_done} of {len(cached.shards)} files are there" if n_done else ""
    inform(
        f"hidden states, computed once: {cached.rows} rows x {T} x {W} in {cached.kind} = "
        f"{byte_size(cached.bytes)} in {cached.directory} ({byte_size(free_bytes)} free{progress})"
    )
    if need + SPARE_BYTES > free_bytes:
        raise UserError(
            f"data.cache_features needs {byte_size(need)} in {cached.directory}, where "
            f"{byte_size(free_bytes)} are free: use fewer bits, fewer samples "
            "(data.max_samples), another data.features_path, or no cache"
        )
