"""Hidden states on disk: the same rows, resumable, announced, refused."""

import dataclasses
import os
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from damages import ARRAY_DAMAGES
from filelock import FileLock
from small_disk import run_on_small_disk
from training_setup import hidden_of, stage_of, tiny_config

from medusa_jax.errors import UserError
from medusa_jax.heads.eagle3 import Eagle3Config
from medusa_jax.model.llama import init_params
from medusa_jax.sharding import make_mesh
from medusa_jax.training import estimate
from medusa_jax.training.data import features, hidden_store
from medusa_jax.training.data.rows import TokenRows
from medusa_jax.training.evaluation import Evaluator
from medusa_jax.training.losses import objectives
from medusa_jax.training.losses.pairs import StepInputs, pair_counts
from medusa_jax.training.stage import Stage

ROW = 16 * 16 * 4  # bytes of a row of 16 tokens, 16 wide, in float32


def config(tokens, workdir, kind="float32"):
    cfg = tiny_config(tokens, "medusa1")
    cfg.data.packing, cfg.data.cache_features = "first_fit", kind
    cfg.workdir = str(workdir)
    os.makedirs(workdir, exist_ok=True)
    return cfg


@pytest.fixture(scope="module")
def frozen():
    arch = tiny_config("").model.arch
    return {"backbone": init_params(arch, jax.random.key(0))}


@pytest.fixture
def shards(monkeypatch):
    """Several files."""
    monkeypatch.setattr(features, "SHARD_BYTES", 30 * ROW)


def rows_of(cfg, **options):
    return TokenRows(cfg.data.source, cfg.data, cfg.model.arch.vocab_size, **options)


def cache(cfg, frozen, fingerprint="abc"):
    made_by = ["float32", dataclasses.asdict(cfg.model), fingerprint]
    given = (made_by, stage_of(cfg), frozen, make_mesh())
    return features.Cache(cfg.data, cfg.workdir, *given)


def cached(cfg, frozen):
    return cache(cfg, frozen).rows(rows_of(cfg), 8)


def stamps(found):
    """Modification times of the files of hidden states."""
    return {name: os.stat(os.path.join(found.directory, name)).st_mtime_ns
            for name in sorted(os.listdir(found.directory))
            if name.startswith("hidden_")}  # fmt: skip


def within_eight_bits(got, wide, D):
    """Within 2^-4 of each value down to 2^-15 of the largest of its vector of D."""
    wide = np.asarray(wide)
    top = np.abs(wide.reshape(*wide.shape[:2], -1, D)).max(-1, keepdims=True)
    least = np.broadcast_to(top * 2.0**-15, (*top.shape[:3], D)).reshape(wide.shape)
    apart = np.abs(np.asarray(got) - wide)
    return apart.any() and (apart <= np.maximum(np.abs(wide) / 16, least)).all()


@pytest.mark.usefixtures("shards")
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8"])
def test_every_batch_of_every_epoch_has_its_own_states(
    tokens, tmp_path, frozen, kind, monkeypatch
):
    """With one file open at a time: a process may open a thousand, a text may have more."""
    monkeypatch.setattr(features, "OPEN_SHARDS", 1)
    cfg = config(tokens, tmp_path, kind)
    found, rows = cached(cfg, frozen), rows_of(cfg)
    assert len(found.shards) > 1 and rows.rows % found.shard_rows
    hidden = hidden_of(cfg)
    for first in (0, rows.rows - 5, 2 * rows.rows + 8):  # across the end of an epoch, too
        batch = found.batch(range(first, first + 8))
        plain = rows.batch(range(first, first + 8))
        assert all(np.array_equal(batch[name], plain[name]) for name in plain)
        expected = np.asarray(hidden(frozen, plain))
        stored = batch["hidden"]
        if kind == "float8":
            assert stored.shape == (8, 16, 16 + 4) and found.bytes == rows.rows * 16 * 20
            got = hidden_store.decode(jnp.asarray(stored), 16, jnp.float32)
            assert within_eight_bits(got, expected, 16)
            continue
        assert stored.dtype == jnp.dtype(kind)
        roundings = 64 if kind == "float32" else 1
        assert_close(stored.astype(np.float32), expected, roundings, kind)
    opened = [os.path.realpath(file) for file in Path("/proc/self/fd").glob("*")]
    assert sum(name.startswith(found.directory) for name in opened) <= 1


def test_passes_without_gradient_are_split_like_a_step(
    tokens, tmp_path, frozen, monkeypatch
):
    """The mesh is in sight where attention is traced, or devices would not use their kernels."""
    cfg, seen = config(tokens, tmp_path), []
    stage = stage_of(cfg)

    def watched(f):
        def run(*given):
            seen.append(jax.sharding.get_abstract_mesh().empty)
            return f(*given)

        return run

    watch = (Stage, "loss"), (estimate, "head_ranks"), (objectives, "hidden_states")
    for owner, name in watch:
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    made = dataclasses.replace(cache(cfg, frozen), stage=stage)
    heads = stage.init(jax.random.key(0), frozen)
    Evaluator(stage, make_mesh(), rows_of(cfg, shuffle=False), 8, 8, 8)(heads, frozen)
    made.rows(rows_of(cfg), 8)
    assert len(seen) >= 5 and not any(seen)


def test_eight_bits_keep_small_values_next_to_large_ones():
    wide = np.random.default_rng(0).standard_normal((2, 3, 2 * 16)).astype(np.float32)
    # Nothing at all; one value that outweighs the others.
    wide[0, 0], wide[1, 1, 0] = 0, 3e3
    stored = hidden_store.encode("float8", wide, 16)
    assert within_eight_bits(hidden_store.decode(stored, 16, jnp.float32), wide, 16)


def test_a_cached_step_does_not_run_the_backbone(tokens, tmp_path, frozen):
    cfg = config(tokens, tmp_path)
    stage, batch = stage_of(cfg), cached(cfg, frozen).batch(range(4))
    poison = jax.tree.map(lambda x: np.full_like(x, np.nan), frozen["backbone"]["layers_0"])
    poisoned = {"backbone": frozen["backbone"] | {"layers_0": poison}}
    heads = jax.jit(stage.init)(jax.random.key(1), frozen)
    counts = jax.jit(pair_counts, static_argnums=1)(batch, stage.offsets)
    run = jax.jit(stage.loss)
    loss, _ = run(heads, poisoned, StepInputs(batch, counts))
    assert np.isfinite(float(loss))
    without = {name: x for name, x in batch.items() if name != "hidden"}
    loss, _ = run(heads, poisoned, StepInputs(without, counts))
    assert not np.isfinite(float(loss))


@pytest.mark.usefixtures("shards")
def test_a_killed_run_goes_on_with_the_missing_files(
    tokens, tmp_path, frozen, monkeypatch, capsys
):
    """As process 0 sees them: others may see a shared directory as it was."""
    cfg = config(tokens, tmp_path)
    found = cached(cfg, frozen)
    before, expected = stamps(found), found.batch(range(found.rows))["hidden"]
    os.remove(found.path(1))
    capsys.readouterr()
    again = cached(cfg, frozen)
    after = stamps(again)
    assert {name for name in after if after[name] > before[name]} == {"hidden_00001.npy"}
    np.testing.assert_array_equal(again.batch(range(found.rows))["hidden"], expected)
    n = len(found.shards)
    assert f"free, {n - 1} of {n} files are there)" in capsys.readouterr().err
    second = lambda x: np.arange(len(x)) == 1  # noqa: E731
    monkeypatch.setattr(features.hosts, "broadcast_from_first", second)
    later = stamps(cached(cfg, frozen))
    assert {name for name in later if later[name] > after[name]} == {"hidden_00001.npy"}
    monkeypatch.undo()
    monkeypatch.setattr(features.Cache, "compute", None)
    cached(cfg, frozen)
    assert "read from" in capsys.readouterr().err


def test_of_two_runs_one_writes_and_the_other_waits(
    tokens, tmp_path, frozen, monkeypatch, capsys
):
    cfg, found = config(tokens, tmp_path), []
    expected = cached(cfg, frozen)
    files, last = stamps(expected), expected.path(expected.shards[-1])
    os.rename(last, last + ".kept")
    with FileLock(expected.directory + "/.lock"):
        run = threading.Thread(target=lambda: found.append(cached(cfg, frozen)))
        run.start()
        run.join(1)
        assert run.is_alive() and not os.path.exists(last)
        # The other run finishes the files; the one that waited computes nothing.
        os.rename(last + ".kept", last)
        monkeypatch.setattr(features.Cache, "compute", None)
    run.join(60)
    assert "another run is writing" in capsys.readouterr().err
    assert stamps(found[0]) == files


def test_the_size_is_announced_and_a_small_disk_refused(
    tokens, tmp_path, frozen, monkeypatch, capsys
):
    cfg = config(tokens, tmp_path)
    n = rows_of(cfg).rows
    small = SimpleNamespace(free=features.SPARE_BYTES + n * ROW - 1)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: small)
    with pytest.raises(UserError, match=r"needs \d+\.\d kB .*use fewer bits, fewer"):
        cached(cfg, frozen)
    assert f"in float32 = {n * ROW / 1000:.1f} kB in" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.npy"))
    cfg.data.cache_features = "bfloat16"
    assert not cached(cfg, frozen).missing


def test_which_files_are_shared(tokens, tmp_path, frozen):
    """A text in another place, in another order, is the same text."""
    cfg = config(tokens, tmp_path)
    shutil.copytree(tokens, tmp_path / "elsewhere")

    def key(fingerprint="abc", change=lambda ids: ids):
        text = rows_of(cfg)
        text.tokens = change(text.tokens.copy())
        return cache(cfg, frozen, fingerprint).key(text)

    first = key()
    cfg.data.source, cfg.data.seed = str(tmp_path / "elsewhere"), 1
    assert key() == first
    others = [key("xyz"), key(change=lambda ids: np.append(ids[:-1], ids[-1] ^ 1))]
    cfg.data.seq_len = 8
    others.append(key())
    cfg.heads = Eagle3Config(n_heads=2)
    others.append(key())
    assert all(key not in others[:i] and key != first for i, key in enumerate(others))


def test_held_out_rows_are_cached_only_as_far_as_they_are_read(tokens, tmp_path, frozen):
    cfg = config(tokens, tmp_path)
    held_out = rows_of(cfg, shuffle=False)
    few = cache(cfg, frozen).rows(held_out, 8, 6)
    assert few.rows == 6 and few.bytes == 6 * ROW
    batch = few.batch(range(4, 8))  # two rows beyond the last: the evaluator blanks them
    hidden = hidden_of(cfg)(frozen, held_out.batch(range(4, 6)))
    assert_close(batch["hidden"][:2], hidden)
    assert cached(cfg, frozen).directory != few.directory


@pytest.mark.usefixtures("shards")
@pytest.mark.parametrize("kind", ["cut", "zeroed", "row less"])
def test_a_damaged_file_is_one_sentence(tokens, tmp_path, frozen, kind):
    cfg = config(tokens, tmp_path)
    found = cached(cfg, frozen)
    expected = found.batch(range(found.rows))["hidden"]
    ARRAY_DAMAGES[kind](Path(found.path(1)))
    with pytest.raises(UserError, match=r"_00001\.npy ") as error:
        cached(cfg, frozen).batch(range(found.rows))
    assert "\n" not in str(error.value)
    os.remove(found.path(1))  # as it says
    again = cached(cfg, frozen).batch(range(found.rows))["hidden"]
    np.testing.assert_array_equal(again, expected)


FULL = """
import sys
import numpy as np
from types import SimpleNamespace
from medusa_jax.errors import UserError
from medusa_jax.training.data.features import CachedRows
cfg = SimpleNamespace(seq_len=64)
rows = CachedRows(SimpleNamespace(cfg=cfg, shuffle=False, crc=0), 64, sys.argv[1], 64, "float32")
try:
    rows.write(0, (np.ones((8, 64, 64), np.float32) for _ in range(8)))
except UserError as error:
    print(error)
"""


def test_a_full_disk_is_one_sentence(tmp_path):
    """Where it fills, a page of a mapped file would end the process (SIGBUS)."""
    done = run_on_small_disk("512k", tmp_path, sys.executable, "-c", FULL, str(tmp_path))
    assert done.returncode == 0, done
    assert "hidden_00000.npy could not be written: " in done.stdout
    assert "No space left on device" in done.stdout
