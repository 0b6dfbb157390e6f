"""Cache directories are in absolute places, and closed to other users."""

import os
from pathlib import Path

import pytest

from medusa_jax import cache_directories
from medusa_jax.cache_directories import cache_directory


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """A directory of temporary files of this test."""
    monkeypatch.setattr(cache_directories.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    cache_directories._scratch.cache_clear()
    return tmp_path / "tmp"


def mode(path):
    return os.stat(path).st_mode & 0o777


@pytest.mark.parametrize(
    ("xdg", "home", "where"),
    [
        ("{tmp}/xdg", "{tmp}/home", "xdg/medusa_jax"),
        ("relative/cache", "{tmp}/home", "home/.cache/medusa_jax"),
        ("", "~", f"tmp/medusa_jax-{os.geteuid()}"),
        ("", "", f"tmp/medusa_jax-{os.geteuid()}"),
    ],
)
def test_caches_are_in_absolute_places(xdg, home, where, temporary, monkeypatch, tmp_path):
    """A HOME that is not set and that no user has stays "~"; what is relative is ignored, as XDG says.

    An empty HOME is not the root directory."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", xdg.format(tmp=tmp_path))
    monkeypatch.setenv("HOME", home.format(tmp=tmp_path))
    path = cache_directory("native")
    assert path == str(tmp_path / where / "native")
    assert mode(path) == mode(os.path.dirname(path)) == 0o700
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("part", ["", "native"])
def test_a_cache_of_another_user(part, temporary, monkeypatch, tmp_path):
    """What it holds is not used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours = tmp_path / "medusa_jax" / "native"
    assert cache_directory("native") == str(ours)
    ours.chmod(0o777)
    assert cache_directory("native") == str(ours) and mode(ours) == 0o700
    os.chown(ours.parent / part, 12345, 12345, follow_symlinks=False)
    second = temporary / f"medusa_jax-{os.geteuid()}"
    assert cache_directory("native") == str(second / "native")
    os.chown(second, 12345, 12345)
    path = cache_directory("native")
    assert path == cache_directory("native") and mode(path) == 0o700
    assert os.path.dirname(path) not in (str(second), str(ours.parent))
    assert path.startswith(str(temporary))


@pytest.mark.parametrize("plant", ["link", "open file", "foreign", "open directory", "own"])
@pytest.mark.parametrize("kind", ["native", "compiled"])
def test_files_of_others_are_removed(plant, kind, monkeypatch, tmp_path):
    """From kernels and from XLA's programs: links, and what others own or could write."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = Path(cache_directory(kind))
    (tmp_path / "library").write_bytes(b"x")
    file = folder / "kernels.so"
    if plant == "link":
        file.symlink_to(tmp_path / "library")
    else:
        file.write_bytes(b"x")
        (folder / "converted").mkdir()
    if plant == "open file":
        file.chmod(0o666)
    if plant == "open directory":
        folder.chmod(0o777)
    if plant == "foreign":
        owner = os.lstat

        def others(path, **more):
            about = owner(path, **more)
            if str(path).endswith("kernels.so"):
                about = os.stat_result([*about[:4], about.st_uid + 1, *about[5:]])
            return about

        monkeypatch.setattr(os, "lstat", others)
    assert cache_directory(kind) == str(folder)
    monkeypatch.undo()
    assert os.path.lexists(file) == (plant == "own")
    assert (tmp_path / "library").exists()
