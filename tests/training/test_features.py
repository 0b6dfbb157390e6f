"""Hidden states on disk: the same rows, the same losses, resumable, announced, refused."""

import os
import shutil
import sys
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned
from closeness import assert_close
from damages import ARRAY_DAMAGES
from filelock import FileLock
from medusa_jax.training.step import abstract_batch
from small_disk import run_on_small_disk
from training_setup import tiny_config

from medusa_jax.errors import UserError
from medusa_jax.heads.eagle3 import Eagle3Config
from medusa_jax.model.llama import init_params
from medusa_jax.sharding import make_mesh
from medusa_jax.training import hidden_store
from medusa_jax.training.data import features, prepare
from medusa_jax.training.data.rows import TokenRows
from medusa_jax.training.stage import make_stage

ROW = 16 * 16 * 4  # bytes of a row of 16 tokens, 16 wide, in float32


def config(tokens, workdir, kind="float32", **train):
    cfg = tiny_config(tokens, "medusa1", **train)
    cfg.data.packing, cfg.data.cache_features = "first_fit", kind
    cfg.workdir = str(workdir)
    os.makedirs(workdir, exist_ok=True)
    return cfg


@pytest.fixture(scope="module")
def setup(tokens):
    """Mesh, stage, frozen variables and rows of the tiny run."""
    cfg = config(tokens, "/tmp")
    frozen = {"backbone": init_params(cfg.model.arch, jax.random.key(0))}
    rows = TokenRows(tokens, cfg.data, cfg.model.arch.vocab_size)
    return make_mesh(), make_stage(cfg, 16), frozen, rows


def cache(cfg, setup):
    mesh, stage, frozen, rows = setup
    return features.cached(cfg, mesh, rows, stage.hidden, frozen, "abc")


def files_of(cached):
    return {name: os.stat(os.path.join(cached.directory, name)).st_mtime_ns
            for name in sorted(os.listdir(cached.directory))
            if name.startswith("hidden_")}  # fmt: skip


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_every_batch_of_every_epoch_has_its_own_states(
    tokens, tmp_path, setup, monkeypatch, kind
):
    monkeypatch.setattr(features, "SHARD_BYTES", 30 * ROW)
    cached = cache(config(tokens, tmp_path, kind), setup)
    _, stage, frozen, rows = setup
    assert len(cached.shards) > 2 and rows.rows % cached.shard_rows
    hidden = jax.jit(stage.hidden)
    for first in (0, rows.rows - 5, 2 * rows.rows + 8):  # across the end of an epoch, too
        batch = cached.batch(first, 8)
        plain = rows.batch(first, 8)
        assert all(np.array_equal(batch[name], plain[name]) for name in plain)
        expected = np.asarray(hidden(frozen, plain))
        assert batch["hidden"].dtype == jnp.dtype(kind)
        roundings = 64 if kind == "float32" else 1
        assert_close(batch["hidden"].astype(np.float32), expected, roundings, kind)


def within_eight_bits(got, wide, D):
    """Within 2^-4 of each value down to 2^-15 of the largest of its vector of D."""
    wide = np.asarray(wide)
    top = np.abs(wide.reshape(*wide.shape[:2], -1, D)).max(-1, keepdims=True)
    least = np.broadcast_to(top * 2.0**-15, (*top.shape[:3], D)).reshape(wide.shape)
    apart = np.abs(np.asarray(got) - wide)
    return apart.any() and (apart <= np.maximum(np.abs(wide) / 16, least)).all()


def test_eight_bits_keep_small_values_next_to_large_ones(tokens, tmp_path, setup):
    cached = cache(config(tokens, tmp_path, "float8"), setup)
    _, stage, frozen, rows = setup
    stored = cached.batch(0, 4)["hidden"]
    assert stored.shape == (4, 16, 16 + 4) and cached.bytes == rows.rows * 16 * 20
    expected = jax.jit(stage.hidden)(frozen, rows.batch(0, 4))
    got = hidden_store.decode(jnp.asarray(stored), 16, jnp.float32)
    assert within_eight_bits(got, expected, 16)
    wide = np.random.default_rng(0).standard_normal((2, 3, 2 * 16)).astype(np.float32)
    wide[0, 0], wide[1, 1, 0] = (
        0,
        3e3,
    )  # nothing at all; one value that outweighs the others
    stored = hidden_store.encode("float8", wide, 16)
    assert within_eight_bits(hidden_store.decode(stored, 16, jnp.float32), wide, 16)


def test_streams_of_inner_layers_are_kept_with_them(tokens, tmp_path):
    """Of EAGLE-3: in files of their own, four times as wide, announced so."""
    cfg = config(tokens, tmp_path, "bfloat16")
    rows, cfg.heads = TokenRows(tokens, cfg.data, 64), Eagle3Config(n_heads=2)
    stage = make_stage(cfg, 16)
    frozen = {"backbone": init_params(cfg.model.arch, jax.random.key(0))}
    cached = cache(cfg, (make_mesh(), stage, frozen, rows))
    stored = cached.batch(0, 4)["hidden"]
    expected = np.asarray(jax.jit(stage.hidden)(frozen, rows.batch(0, 4)))
    assert stored.shape == expected.shape == (4, 16, 4 * 16)
    assert_close(stored.astype(np.float32), expected, 1, "bfloat16")
    shape = abstract_batch(cfg, make_mesh())["hidden"]
    assert (shape.shape[2:], shape.dtype) == (stored.shape[1:], stored.dtype)


def test_process_0_says_which_files_are_missing(tokens, tmp_path, setup, monkeypatch):
    """Others may see a shared directory as it was; all have to compute the same rows together."""
    monkeypatch.setattr(features, "SHARD_BYTES", 30 * ROW)
    cfg = config(tokens, tmp_path)
    before = files_of(cache(cfg, setup))
    monkeypatch.setattr(
        features.hosts, "broadcast_from_first", lambda x: np.arange(len(x)) == 1
    )
    after = files_of(cache(cfg, setup))
    assert before.keys() == after.keys()
    assert {name for name in after if after[name] > before[name]} == {"hidden_00001.npy"}


@pytest.fixture
def more(tokens, tmp_path):
    """A second text."""
    shutil.copytree(tokens, tmp_path / "more")
    ids = np.load(tmp_path / "more" / "tokens.npy")
    np.save(tmp_path / "more" / "tokens.npy", ids[::-1].copy())
    return str(tmp_path / "more")


def test_a_cached_step_does_not_run_the_backbone(tokens, tmp_path, setup):
    cfg = config(tokens, tmp_path)
    _, stage, frozen, _ = setup
    batch = cache(cfg, setup).batch(0, 4)
    poison = jax.tree.map(lambda x: np.full_like(x, np.nan), frozen["backbone"]["layers_0"])
    poisoned = {"backbone": frozen["backbone"] | {"layers_0": poison}}
    heads = jax.jit(stage.init)(jax.random.key(1), frozen)
    from medusa_jax.training import losses

    counts = jax.jit(losses.pair_counts, static_argnums=1)(batch, stage.offsets)
    run = jax.jit(stage.loss)
    loss, _ = run(heads, poisoned, losses.StepInputs(batch, counts))
    assert np.isfinite(float(loss))
    without = {name: x for name, x in batch.items() if name != "hidden"}
    loss, _ = run(heads, poisoned, losses.StepInputs(without, counts))
    assert not np.isfinite(float(loss))


def test_a_killed_run_goes_on_with_the_missing_files(
    tokens, tmp_path, setup, monkeypatch, capsys
):
    monkeypatch.setattr(features, "SHARD_BYTES", 30 * ROW)
    cfg = config(tokens, tmp_path)
    first = cache(cfg, setup)
    before, expected = files_of(first), first.batch(0, first.rows)["hidden"]
    last = first.path(first.shards[-1])
    os.remove(last)
    half = f"{last}.new"
    with open(half, "wb") as file:
        file.write(b"cut off")
    capsys.readouterr()
    second = cache(cfg, setup)
    assert f"{len(first.shards) - 1} of {len(first.shards)} files are there" in (
        capsys.readouterr().err
    )
    after = files_of(second)
    kept = [name for name in before if os.path.join(first.directory, name) != last]
    assert all(before[name] == after[name] for name in kept) and os.path.exists(last)
    np.testing.assert_array_equal(second.batch(0, first.rows)["hidden"], expected)
    # Complete: nothing is computed any more.
    monkeypatch.setattr(features, "compute", None)
    cache(cfg, setup)
    assert "read from" in capsys.readouterr().err


def test_of_two_runs_one_writes_and_the_other_waits(
    tokens, tmp_path, setup, monkeypatch, capsys
):
    cfg, found = config(tokens, tmp_path), []
    expected = cache(cfg, setup)
    directory, files = expected.directory, files_of(expected)
    last = expected.path(expected.shards[-1])
    os.rename(last, last + ".kept")
    other = FileLock(directory + "/.lock")
    with other:
        run = threading.Thread(target=lambda: found.append(cache(cfg, setup)))
        run.start()
        run.join(1)
        assert run.is_alive() and not os.path.exists(last)
        # The other run finishes the files; the one that waited computes nothing.
        os.rename(last + ".kept", last)
        monkeypatch.setattr(features, "compute", None)
    run.join(60)
    assert "another run is writing" in capsys.readouterr().err
    assert files_of(found[0]) == files


def test_the_size_is_announced_and_a_small_disk_refused(
    tokens, tmp_path, setup, monkeypatch, capsys
):
    cfg = config(tokens, tmp_path)
    rows = setup[3].rows
    small = SimpleNamespace(free=features.SPARE_BYTES + rows * ROW - 1)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: small)
    with pytest.raises(UserError, match=r"needs 0\.0 GiB .*use fewer bits, fewer samples"):
        cache(cfg, setup)
    assert f"{rows} rows x 16 x 16 in float32 = 0.00 GiB" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.npy"))
    cfg.data.cache_features = "bfloat16"
    assert not cache(cfg, setup).missing


def test_runs_of_other_seeds_share_the_files_but_not_the_order(tokens, tmp_path):
    """`data.seed` orders rows; what is in them, and so the cache, is the same."""
    batches = []
    for seed in (0, 1):
        cfg = config(tokens, tmp_path / f"run{seed}")
        cfg.data.seed, cfg.data.features_path = seed, str(tmp_path / "shared")
        rows = TokenRows(tokens, cfg.data, cfg.model.arch.vocab_size)
        frozen = {"backbone": init_params(cfg.model.arch, jax.random.key(0))}
        stage = make_stage(cfg, 16)
        cached = features.cached(cfg, make_mesh(), rows, stage.hidden, frozen, "abc")
        batches.append(cached.batch(0, 8))
        hidden = jax.jit(stage.hidden)(frozen, rows.batch(0, 8))
        assert_close(batches[-1]["hidden"], hidden)
    assert len([x for x in (tmp_path / "shared").iterdir() if x.is_dir()]) == 1
    assert not np.array_equal(batches[0]["tokens"], batches[1]["tokens"])


def test_which_files_are_shared(tokens, tmp_path, setup):
    """A text in another place is the same text: every workdir tokenises conversations for itself."""
    cfg = config(tokens, tmp_path)
    shutil.copytree(tokens, tmp_path / "elsewhere")

    def key(source=tokens, backbone="abc", change=lambda ids: ids):
        rows = TokenRows(str(source), cfg.data, cfg.model.arch.vocab_size)
        rows.tokens = change(rows.tokens.copy())
        return features.key_of(cfg, rows, backbone)

    first, others = key(), [key(backbone="xyz")]
    assert key(tmp_path / "elsewhere") == first
    others.append(key(change=lambda ids: np.append(ids[:-1], ids[-1] ^ 1)))
    cfg.data.seq_len = 8
    others.append(key())
    cfg.heads = Eagle3Config(n_heads=2)
    others.append(key())
    assert all(key not in others[:i] and key != first for i, key in enumerate(others))


def test_held_out_rows_are_cached_only_as_far_as_they_are_read(tokens, tmp_path, setup):
    mesh, stage, frozen, _ = setup
    cfg = config(tokens, tmp_path)
    held_out = TokenRows(tokens, cfg.data, 64, shuffle=False)
    few = features.cached(cfg, mesh, held_out, stage.hidden, frozen, "abc", 6)
    assert few.rows == 6 and few.bytes == 6 * ROW
    batch = few.batch(4, 4)  # two rows beyond the last: the evaluator blanks them
    hidden = jax.jit(stage.hidden)(frozen, held_out.batch(4, 2))
    assert_close(batch["hidden"][:2], hidden)
    assert cache(cfg, setup).directory != few.directory


def test_a_text_that_is_added_leaves_the_states_of_the_others(
    tokens, more, tmp_path, setup
):
    """Each text of `data.source` has its own files."""
    mesh, stage, frozen, _ = setup
    cfg = config(tokens, tmp_path)
    cached = []
    for source in (tokens, f"{more},{tokens}"):
        cfg.data.source = source
        texts = [features.cached(cfg, mesh, text, stage.hidden, frozen, "abc")
                 for text in prepare.texts(cfg)]  # fmt: skip
        cached.append([(text.directory, files_of(text)) for text in texts])
    (alone,), (added, again) = cached
    assert alone == again and added[0] != alone[0]


@pytest.mark.parametrize("file", ["hidden_00001.npy", "crc32_00001.npy"])
@pytest.mark.parametrize("kind", thinned(ARRAY_DAMAGES, "cut", "rows zeroed", "row less"))
def test_a_damaged_file_is_one_sentence(tokens, tmp_path, setup, monkeypatch, kind, file):
    monkeypatch.setattr(features, "SHARD_BYTES", 30 * ROW)
    cfg = config(tokens, tmp_path)
    found = cache(cfg, setup)
    expected = found.batch(0, found.rows)["hidden"]
    ARRAY_DAMAGES[kind](tmp_path / "features" / os.path.basename(found.directory) / file)
    with pytest.raises(
        UserError, match=r"_00001\.npy .*(it|npy) and start again$"
    ) as error:
        cache(cfg, setup).batch(0, found.rows)
    assert "\n" not in str(error.value)
    os.remove(found.path(1))  # as it says
    np.testing.assert_array_equal(
        cache(cfg, setup).batch(0, found.rows)["hidden"], expected
    )


def test_files_without_checksums_are_read(tokens, tmp_path, setup):
    """As earlier versions wrote them."""
    cfg = config(tokens, tmp_path)
    found = cache(cfg, setup)
    os.remove(found.path(0, "crc32"))
    assert found.batch(0, 8)["hidden"].any()


def test_a_file_grows_as_it_is_written(tokens, tmp_path, setup):
    """No size without disk: where that fills, a page of a mapped file ends the process (SIGBUS)."""
    cfg = config(tokens, tmp_path)
    found = cache(cfg, setup)
    whole = np.load(found.path(0))

    def batches():
        yield whole[:100]
        [new] = (tmp_path / "features").glob("*/*.new/*")
        assert new.stat().st_size <= whole[:100].nbytes + 1000
        yield whole[100:]

    found.write(0, batches())
    np.testing.assert_array_equal(np.load(found.path(0)), whole)


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
    done = run_on_small_disk("512k", tmp_path, sys.executable, "-c", FULL, str(tmp_path))
    assert done.returncode == 0, done  # SIGBUS: -7
    assert "hidden_00000.npy could not be written: " in done.stdout
    assert "No space left on device" in done.stdout
