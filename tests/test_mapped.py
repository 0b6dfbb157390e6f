"""Trees in the user's cache: what is mapped is what was made, and nothing else is ever mapped."""

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from medusa_jax import mapped
from medusa_jax.cpu.panels import Panels
from medusa_jax.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mapped, "LEAST_BYTES", 1)
    (tmp_path / "model").write_bytes(b"weights")
    return tmp_path / "cache" / "medusa_jax" / "packed"


def example():
    words = jax.numpy.arange(96, dtype="uint32").reshape(3, 32)
    panels = Panels(words, None, "Q4_0", 32, 90, 16)
    norm = np.arange(5).astype(ml_dtypes.bfloat16)
    return {
        "head": panels,
        "embed": panels,
        "norm": (norm, np.zeros((0,), np.float32)),
        "name": "x",
    }


def kept(tmp_path, make, marks=None):
    made = mapped.made_once("weights", [str(tmp_path / "model")], marks, make)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and "_write" in thread.name:
            thread.join()
    return made


def refuse():
    raise AssertionError("made again")


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert jax.tree.structure(a) == jax.tree.structure(b)


def test_a_tree_is_mapped_and_not_copied(tmp_path, folder):
    kept(tmp_path, example)
    [file] = folder.iterdir()
    again = kept(tmp_path, refuse)
    same(again, example())
    places = [again[name].panels.unsafe_buffer_pointer() for name in ("head", "embed")]
    assert places[0] == places[1]  # tied weights are stored once
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = [line.split()[0] for line in lines if str(file) in line]
    ranges = [[int(x, 16) for x in one.split("-")] for one in maps]
    assert any(first <= places[0] < last for first, last in ranges)
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("fault", ["truncated", "empty", "header", "foreign", "link"])
def test_a_file_that_is_not_whole_and_ours_is_made_again(tmp_path, folder, fault):
    kept(tmp_path, example)
    [file] = folder.iterdir()
    data = file.read_bytes()
    if fault == "foreign":
        if os.geteuid():
            pytest.skip("only root gives files away")
        os.chown(file, 12345, 12345)
    elif fault == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        header = data.replace(b'"uint32"', b'"int32"')  # readable, and of another type
        assert header != data
        file.write_bytes({"truncated": data[:-50], "empty": b"", "header": header}[fault])
    calls = []
    same(kept(tmp_path, lambda: calls.append(1) or example()), example())
    assert calls == [1]
    same(kept(tmp_path, refuse), example())


@pytest.mark.parametrize("kind", ["subprocess:Popen", "medusa_jax.mapped:read"])
def test_only_classes_of_the_package_are_rebuilt(kind):
    with pytest.raises(ValueError, match="no class of this package"):
        mapped.rebuilt({kind: {}})


def test_the_key_is_the_content(tmp_path, folder, monkeypatch):
    kept(tmp_path, example)
    (tmp_path / "model").rename(tmp_path / "moved")
    (tmp_path / "model").symlink_to(tmp_path / "moved")
    same(kept(tmp_path, refuse), example())
    (tmp_path / "moved").write_bytes(b"WEIGHTS")
    others = [
        lambda: kept(tmp_path, dict),
        lambda: kept(tmp_path, dict, marks=(8, np.dtype("float32"))),
    ]
    monkeypatch.setattr(mapped, "package_mark", lambda: "another version")
    others.append(lambda: kept(tmp_path, dict))
    assert [other() for other in others] == [{}] * 3
    assert kept(tmp_path, dict, marks=object()) == {}  # not known to be the same next time


def test_the_least_recently_used_files_make_room(tmp_path, folder, monkeypatch):
    for mark in range(3):
        kept(tmp_path, lambda: {"x": np.zeros(1000, np.uint8)}, mark)
    first, second, third = sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns)
    for i, file in enumerate((second, first, third)):
        os.utime(file, (i, i))
    kept(tmp_path, refuse, 1)  # the second is used
    monkeypatch.setenv(mapped.LIMIT, "0.0000045")
    kept(tmp_path, lambda: {"x": np.zeros(1100, np.uint8)}, 3)
    assert not first.exists() and second.exists() and third.exists()
    kept(tmp_path, lambda: {"x": np.zeros(9000, np.uint8)}, 4)
    assert len([*folder.iterdir()]) == 3
    for given in ("much", "-1", "nan"):
        monkeypatch.setenv(mapped.LIMIT, given)
        with pytest.raises(UserError, match=f"number of gigabytes.*'{given}'"):
            kept(tmp_path, dict)


def test_a_full_disk(tmp_path, folder):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    try:
        same(kept(tmp_path, example), example())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [*folder.iterdir()]
    kept(tmp_path, example)
    same(kept(tmp_path, refuse), example())


CHILD = """
import os, sys
import numpy as np
from medusa_jax import mapped
mapped.LEAST_BYTES = 1
if sys.argv[2] == "killed":
    replace = os.replace
    os.replace = lambda a, b: os.kill(os.getpid(), 9) if "packed" in str(b) else replace(a, b)
print(mapped.made_once("weights", [sys.argv[1]], None, lambda: {"x": np.arange(99)})["x"].sum())
"""


def test_a_kill_and_two_processes_at_once(tmp_path, folder):
    def start(how):
        words = [sys.executable, "-c", CHILD, str(tmp_path / "model"), how]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    start("killed").wait()
    [left] = folder.iterdir()
    assert left.suffix == ".new"
    again = folder / "another.abcdefgh.new"  # of a model that is not used any more
    again.mkdir()
    (again / "another").write_bytes(b"half")
    both = [start("whole") for _ in range(2)]
    assert [one.communicate()[0] for one in both] == ["4851\n"] * 2
    [file] = folder.iterdir()
    assert file.is_file()
    assert mapped.read(file)["x"].sum() == 4851
