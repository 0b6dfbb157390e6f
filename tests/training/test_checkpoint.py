"""Checkpoints: what is in them, and that a failed one leaves the last one whole."""

import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from medusa_jax.errors import UserError
from medusa_jax.sharding import make_mesh, replicated
from medusa_jax.training.checkpoint import Checkpoints


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


FULL_DISK = """
import resource, sys, time
from medusa_jax.errors import UserError
from medusa_jax.training.checkpoint import Checkpoints
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

    The run that met it is a process of its own: its writes may go on behind the error, and
    whoever continues the run starts after it has ended.
    """
    child = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert re.search(r"step 2 .* failed .*; step 1 remains", child.stdout), child.stderr
    again = Checkpoints(str(tmp_path), keep=2)
    assert again.latest == 1
    jax.tree.map(
        np.testing.assert_array_equal, again.restore(*trees(0.0))[0], trees(1.0)[0]
    )
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
