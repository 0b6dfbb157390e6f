"""Checkpoints: what is in them, and that a failed one leaves the last one whole."""

import os
import re
import shutil

import damages
import jax
import numpy as np
import pytest
from cases import wide
from children import output_of
from training_setup import groups_of, tiny_config

from medusa_jax.config import OptimConfig
from medusa_jax.errors import UserError
from medusa_jax.sharding import make_mesh, replicated
from medusa_jax.training.checkpoint import Checkpoints
from medusa_jax.training.optim.optimizer import make_optimizer


def trees(value):
    sharding = replicated(make_mesh())
    noise = np.random.default_rng(0).random((64, 64), np.float32)  # does not compress
    params = {"w": jax.device_put(noise + np.float32(value), sharding)}
    return params, {"m": jax.device_put(-noise, sharding)}


def test_what_was_saved_comes_back(tmp_path):
    with Checkpoints(str(tmp_path), keep=2) as store:
        for step in (1, 2, 3):
            store.save(step, *trees(step / 3), {"step": step}, {"best": float("inf")})
    again = Checkpoints(str(tmp_path), keep=2)
    params, opt, data, meta = again.restore(*trees(0.0))
    assert again.latest == 3 and data == {"step": 3} and meta["best"] == float("inf")
    jax.tree.map(np.testing.assert_array_equal, (params, opt), trees(1.0))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


@pytest.mark.parametrize("saved", [0, 1])
def test_clipping_may_change_when_a_run_is_resumed(tmp_path, saved):
    params, groups = {"heads": trees(1.0)[0]}, groups_of(tiny_config("", "medusa1"))
    rules = [make_optimizer(OptimConfig(clip_norm=x), groups, 4) for x in (0.0, 1.0)]
    states = [jax.jit(rule.init)(params) for rule in rules]
    with Checkpoints(str(tmp_path), keep=1) as store:
        store.save(1, params, states[saved], {}, {})
        for opt in states:
            found = store.restore(params, opt)[1]
            assert jax.tree.structure(found) == jax.tree.structure(opt)


FULL_DISK = """
import resource, sys, time
from medusa_jax.config import OptimConfig
from medusa_jax.errors import UserError
from medusa_jax.training.checkpoint import Checkpoints
from medusa_jax.training.optim.optimizer import make_optimizer
from tests.training.test_checkpoint import trees

store = Checkpoints(sys.argv[1], keep=2)
store.save(1, *trees(1.0), {}, {})
store.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    store.save(2, *trees(2.0), {}, {})
    while True:  # as the loop asks after each step
        store.check()
        time.sleep(0.01)
except UserError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path):
    """Writes beyond a size fail in the kernel, as they do on a full disk.

    The run that met it is a separate process: its writes may go on after the error, and
    the run is continued after it has ended.
    """
    said = output_of(FULL_DISK, tmp_path)
    assert re.search(r"step 2 .* failed .*; step 1 remains", said), said
    again = Checkpoints(str(tmp_path), keep=2)
    assert again.latest == 1
    params, *_ = again.restore(*trees(0.0))
    jax.tree.map(np.testing.assert_array_equal, params, trees(1.0)[0])
    again.save(3, *trees(3.0), {}, {})
    assert again.latest == 3


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    store = Checkpoints(str(tmp_path), keep=2)
    store.save(1, *trees(1.0), {}, {})
    params, opt = trees(1.0)
    other = {"w": params["w"], "more": params["w"]}
    with pytest.raises(UserError, match="does not fit this configuration"):
        store.restore(other, opt)
    with pytest.raises(UserError, match="does not fit this configuration"):
        store.restore({"w": params["w"][:32]}, opt)


DAMAGES = damages.DAMAGES | {"deleted": os.remove}
EVERY = [(kind, "**/*") for kind in DAMAGES]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """Checkpoints of steps 1 and 2."""
    path = tmp_path_factory.mktemp("two")
    with Checkpoints(str(path), keep=2) as store:
        for step in (1, 2):
            store.save(step, *trees(step / 3), {"step": step}, {"step": step})
    return path


def is_step(found, step):
    params, opt, data, meta = found
    jax.tree.map(np.testing.assert_array_equal, (params, opt), trees(step / 3))
    return data == meta == {"step": step}


@pytest.mark.parametrize(
    ("kind", "files"),
    [("flipped", "trainable/o*/d/*"), ("cut", "meta/metadata"), *wide(*EVERY)],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    two_steps, tmp_path, capsys, kind, files
):
    """Each file in turn; those that Orbax writes at the very end hold nothing that is read."""
    found = [p for p in (two_steps / "checkpoints" / "2").glob(files) if p.is_file()]
    assert len(found) > (20 if files == "**/*" else 0)
    for file in found:
        work = tmp_path / "w"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(two_steps, work)
        DAMAGES[kind](work / file.relative_to(two_steps))
        store = Checkpoints(str(work), keep=2)
        found, said = store.restore(*trees(0.0)), capsys.readouterr().err
        step = work / "checkpoints" / "2"
        if "is damaged" not in said:
            unread = ("_CHECKPOINT_METADATA", "commit_success.txt")
            gone = kind == "deleted" and file.name == "checksums.json"
            assert file.parent.name == "2" and (file.name in unread or gone)
            assert is_step(found, 2) and store.latest == 2
            continue
        assert is_step(found, 1) and store.latest == 1
        assert f"kept as {step}.damaged; resuming from step 1\n" in said
        assert not step.exists() and (work / "checkpoints" / "2.damaged").is_dir()
    store.save(2, *trees(2 / 3), {"step": 2}, {"step": 2})
    assert store.latest == 2 and is_step(store.restore(*trees(0.0)), 2)


def test_when_all_are_damaged_one_sentence_says_so(two_steps, tmp_path):
    work = shutil.copytree(two_steps, tmp_path / "w")
    for step in "12":
        for file in (work / "checkpoints" / step / "trainable").rglob("manifest.ocdbt"):
            file.write_bytes(b"")
    with pytest.raises(UserError, match=r"^no checkpoint in .*step 2: .*step 1: "):
        Checkpoints(str(work), keep=2).restore(*trees(0.0))
    assert sorted(os.listdir(work / "checkpoints")) == ["1", "2"]
