"""Programs that are kept for later starts: the same results, and no tracing."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from medusa_jax import kept_programs, programs
from medusa_jax.decoding.request import keys_of_rows
from medusa_jax.kept_programs import KeptPrograms
from medusa_jax.programs import program


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(programs, "store", KeptPrograms())
    return tmp_path / "medusa_jax" / "programs"


def finish():
    [t.join() for t in threading.enumerate() if "_write" in t.name]


def make(traced, static=0):
    def step(n, state, seed):
        traced.append(n)
        key = jax.random.key(seed, impl="threefry2x32")
        return {"x": state["x"] * n, "skip": state["skip"] + 1, "key": key, "none": None}, (
            seed + 1,
        )

    step.__module__ = "medusa_jax.test"
    return program(static_argnums=static, donate_argnums=1)(step)


def arguments():
    return {"x": jnp.arange(4.0), "skip": jnp.ones(4)}, np.uint32(3)


def test_a_later_start_does_not_trace(folder):
    traced = []
    plain = jax.jit(make(traced).__wrapped__, static_argnums=0)(2, *arguments())
    for count in (2, 2, 2):
        state, seed = arguments()
        out = make(traced)(2, state, seed)
        finish()
        assert jax.tree.structure(out) == jax.tree.structure(plain)
        jax.tree.map(np.testing.assert_array_equal, words(out), words(plain))
        assert len(traced) == count and state["x"].is_deleted()
    make(traced)(3, *arguments())  # another static argument
    finish()
    assert len(traced) == 3 and len([*folder.iterdir()]) == 2


def test_a_kept_program_in_another_ones_trace(folder):
    """With NumPy arrays, which become constants of the other program."""
    kept = make([], static=())
    out = kept(2, {"x": np.arange(4.0, dtype=np.float32), "skip": np.ones(4)}, np.uint32(3))

    @jax.jit
    def other(y):
        state = {"x": np.arange(4.0, dtype=np.float32), "skip": np.ones(4)}
        return y + kept(np.int32(2), state, np.uint32(3))[0]["x"]

    kept(
        np.int32(2),
        {"x": np.arange(4.0, dtype=np.float32), "skip": np.ones(4)},
        np.uint32(3),
    )
    np.testing.assert_array_equal(other(1.0), 1 + out[0]["x"])
    finish()


def test_a_failed_compilation_is_tried_again(folder, monkeypatch):
    kept, compile_new = make([]), kept_programs.compile_new
    monkeypatch.setattr(kept_programs, "compile_new", lambda lowered: 1 / 0)
    assert kept.prepare(2, *arguments())
    with pytest.raises(ZeroDivisionError):
        kept(2, *arguments())
    monkeypatch.setattr(kept_programs, "compile_new", compile_new)
    assert kept(2, *arguments())[0]["x"].tolist() == [0, 2, 4, 6]
    finish()


def test_arguments_are_not_kept(folder):
    """Whoever prepares a program may free its arrays, such as weights."""
    kept = make([])
    state, seed = arguments()
    array = jnp.ones(4)
    ref = weakref.ref(array)
    kept.prepare(2, state | {"x": array}, seed).run.result()
    del array
    gc.collect()
    assert ref() is None
    finish()


def test_a_call_compiles_on_its_thread(folder, monkeypatch):
    """A server compiles ahead on threads of low priority; `prepare` compiles on others."""
    kept, compile_new, threads = make([]), kept_programs.compile_new, []

    def recorded(lowered):
        threads.append(threading.current_thread())
        return compile_new(lowered)

    monkeypatch.setattr(kept_programs, "compile_new", recorded)
    kept(2, *arguments())
    kept.prepare(3, *arguments()).run.result()
    assert [t is threading.current_thread() for t in threads] == [True, False]
    finish()


def words(out):
    return {**out[0], "key": jax.random.key_data(out[0]["key"])}, out[1]


@pytest.mark.parametrize("place", [-1, 100, 0, b"jit(step)"])
def test_a_damaged_program_is_compiled_again(folder, place):
    traced = []
    first = make(traced)(2, *arguments())
    finish()
    [file] = folder.iterdir()
    data = bytearray(file.read_bytes())
    data[place if isinstance(place, int) else data.index(place)] ^= 1
    file.write_bytes(data)
    again = make(traced)(2, *arguments())
    jax.tree.map(np.testing.assert_array_equal, words(first), words(again))
    assert len(traced) == 2
    finish()


def test_programs_of_others_are_not_kept(folder):
    class Mine:
        def __rmul__(self, x):
            return x

    make([])(Mine(), *arguments())
    foreign = make([])
    foreign.__module__ = "examples.mine"
    foreign(2, *arguments())
    finish()
    assert not folder.exists() or not [*folder.iterdir()]


def test_keys_are_those_of_jax():
    seeds, ids = np.array([1, 2], np.uint32), np.array([3, 3], np.uint32)
    expected = [
        jax.random.fold_in(jax.random.key(s, impl="threefry2x32"), 3) for s in (1, 2)
    ]
    for key, one in zip(keys_of_rows(seeds, ids), expected):
        assert jax.random.key_data(key).tolist() == jax.random.key_data(one).tolist()
    finish()
