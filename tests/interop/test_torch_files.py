"""Reading torch's files: right on good ones, closed on everything else."""

import contextlib
import os
import pathlib
import pickle
import random
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_jax.errors import UserError
from medusa_jax.formats.torch_files import open_torch
from medusa_jax.formats.torch_writer import save_torch

PICKLE_2 = b"\x80\x02"


def write(path, data_pkl, storages=(), root="archive", **options):
    """A torch-like archive by hand; `storages` are (key, bytes)."""
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr(f"{root}/data.pkl", data_pkl)
        for key, raw in storages:
            archive.writestr(f"{root}/data/{key}", raw)
    return str(path)


def glob(module, name):
    return f"c{module}\n{name}\n".encode()


def text(value):
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value):
    if value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(12, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def numbers(values):
    return b"(" + b"".join(map(integer, values)) + b"t"


def storage(key="0", size=6, kind="FloatStorage"):
    pid = text("storage") + glob("torch", kind) + text(key) + text("cpu") + integer(size)
    return b"(" + pid + b"tQ"


def tensor(shape, strides, offset=0, store=None, rebuild="_rebuild_tensor_v2"):
    """Opcodes that push one tensor."""
    arguments = (store or storage()) + integer(offset) + numbers(shape) + numbers(strides)
    hooks = b"\x89" + glob("collections", "OrderedDict") + b")R"
    return glob("torch._utils", rebuild) + b"(" + arguments + hooks + b"tR"


def dictionary(*items):
    return PICKLE_2 + b"}(" + b"".join(text(k) + v for k, v in items) + b"u."


SIX = np.arange(6, dtype=np.float32)


def one_tensor(path, *args, raw=None, **kwargs):
    raw = SIX.tobytes() if raw is None else raw
    return write(path, dictionary(("x", tensor(*args, **kwargs))), [("0", raw)])


def read(tensors, name):
    return tensors[name].read(tuple(slice(0, n) for n in tensors[name].shape))


def test_views_by_hand(tmp_path):
    """[[0, 1, 2], [3, 4, 5]] and its transpose, and a part of it."""
    whole = read(open_torch(one_tensor(tmp_path / "a", [2, 3], [3, 1])), "x")
    np.testing.assert_array_equal(whole, SIX.reshape(2, 3))
    turned = open_torch(one_tensor(tmp_path / "b", [3, 2], [1, 3]))
    np.testing.assert_array_equal(read(turned, "x"), SIX.reshape(2, 3).T)
    np.testing.assert_array_equal(turned["x"].read((slice(1, 2), slice(0, 2))), [[1, 4]])
    part = open_torch(one_tensor(tmp_path / "c", [2], [3], offset=2))
    np.testing.assert_array_equal(read(part, "x"), [2, 5])


def test_everything_torch_writes(tmp_path):
    torch = pytest.importorskip("torch")
    a = torch.randn(4, 6)
    state = {
        "plain": a,
        "transposed": a.t(),
        "view": a[1:3, ::2],
        "bfloat16": a.bfloat16(),
        "half": a.half(),
        "double": a.double(),
        "long": torch.arange(5),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(a),
    }
    path = str(tmp_path / "state.bin")
    torch.save(state, path)
    tensors = open_torch(path)
    assert set(tensors) == set(state)
    for name, theirs in state.items():
        ours = read(tensors, name)
        np.testing.assert_array_equal(
            ours.astype(np.float64), theirs.detach().double().numpy()
        )
    # A state dict is an OrderedDict with an attribute.
    torch.save(torch.nn.Linear(3, 2).state_dict(), path)
    assert {k: v.shape for k, v in open_torch(path).items()} == {
        "weight": (2, 3),
        "bias": (2,),
    }


def test_our_files_are_torchs(tmp_path):
    """What `save_torch` writes, through torch.load, also mapped into memory."""
    torch = pytest.importorskip("torch")
    arrays = {}
    for name in ("float32", "float16", "bfloat16", "int64"):
        arrays[name] = SIX.reshape(2, 3).astype(np.dtype(getattr(ml_dtypes, name, name)))
    arrays["transposed"] = SIX.reshape(2, 3).T
    save_torch(str(tmp_path / "x.pt"), arrays)
    for options in ({}, {"mmap": True}):
        state = torch.load(tmp_path / "x.pt", weights_only=True, **options)
        assert state.keys() == arrays.keys()
        for name, x in arrays.items():
            assert str(state[name].dtype).removeprefix("torch.") == x.dtype.name
            np.testing.assert_array_equal(state[name].double(), x.astype(np.float64))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_views_equal_torch(tmp_path_factory, seed):
    torch = pytest.importorskip("torch")
    rng = random.Random(seed)
    x = torch.arange(60.0).reshape(rng.choice([(60,), (6, 10), (3, 4, 5), (2, 3, 2, 5)]))
    for _ in range(rng.randrange(4)):
        x = x.permute(rng.sample(range(x.ndim), x.ndim))
        axis = rng.randrange(x.ndim)
        start = rng.randrange(x.shape[axis] + 1)
        x = x[(slice(None),) * axis + (slice(start, None, rng.choice([1, 2])),)]
    path = str(tmp_path_factory.mktemp("view") / "x.pt")
    torch.save({"x": x}, path)
    np.testing.assert_array_equal(read(open_torch(path), "x"), x.numpy())


def refused(path, match=""):
    with pytest.raises(UserError, match=match):
        open_torch(str(path))


def test_code_is_refused_and_not_run(tmp_path):
    flag = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {flag}",)

    for protocol in range(5):
        write(tmp_path / "x", pickle.dumps({"w": Evil()}, protocol))
        refused(tmp_path / "x", "refused")
    for module, name in (
        ("builtins", "eval"),
        ("torch._utils", "_rebuild_sparse_tensor"),
        ("collections", "OrderedDict.fromkeys"),
        ("torch.serialization", "os.system"),
    ):
        data = PICKLE_2 + glob(module, name) + b"(" + text(f"touch {flag}") + b"tR."
        write(tmp_path / "x", data)
        refused(tmp_path / "x", f"it asks for {module}.{name}, which no weights need")
    assert not flag.exists()


BOUNDS = {
    "beyond the end": ([2, 3], [3, 1], 1),
    "stride beyond the end": ([2, 2], [5, 2], 0),
    "expanded": ([3, 6], [0, 1], 0),
    "negative size": ([-1, -6], [1, 1], 0),
    "ranks differ": ([2, 3], [1], 0),
    "empty, and huger than a number of bytes": ([0, 2**31, 2**31], [1, 1, 1], 0),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_views_out_of_bounds(name, tmp_path):
    shape, strides, offset = BOUNDS[name]
    refused(one_tensor(tmp_path / "x", shape, strides, offset), "tensor")


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [([1, 6], [10**25, 1], 0), ([6, 1], [1, 2**63 - 1], 0), ([0], [10**25], 10**25)],
)
def test_steps_that_are_never_taken(shape, strides, offset, tmp_path):
    """They overflowed where the tensor was read."""
    tensors = open_torch(one_tensor(tmp_path / "x", shape, strides, offset))
    wanted = SIX if offset == 0 else SIX[:0]
    np.testing.assert_array_equal(read(tensors, "x"), wanted.reshape(shape))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"raw": b"\0" * 23}, "cut short"),
        ({"store": storage(key="../../../etc/passwd")}, "bytes of 'x' are missing"),
        ({"store": storage(size=-6)}, "malformed storage"),
        ({"store": integer(5)}, "malformed tensor"),
        ({"store": storage(kind="QInt8Storage")}, r"torch\.QInt8Storage"),
        ({"store": b"NQ"}, "refused"),
    ],
)
def test_storages_out_of_bounds(changes, message, tmp_path):
    refused(one_tensor(tmp_path / "x", [6], [1], **changes), message)


def test_state_cannot_be_set_past_the_checks(tmp_path):
    """BUILD on a finished tensor or storage would change its bounds."""
    good = tensor([2, 3], [3, 1])
    states = [
        b"(" + storage() + integer(10**6) + numbers([2]) + numbers([1]) + b"tb",
        b"}" + text("offset") + integer(10**6) + b"sb",
        b"(N}" + text("offset") + integer(10**6) + b"stb",
    ]
    for state in states:
        write(tmp_path / "x", dictionary(("x", good + state)), [("0", SIX.tobytes())])
        refused(tmp_path / "x", "sets the state of an object")
        bent = storage() + state
        refused(one_tensor(tmp_path / "x", [6], [1], store=bent), "sets the state")
        for name in (("torch", "FloatStorage"), ("torch._utils", "_rebuild_tensor_v2")):
            write(tmp_path / "x", PICKLE_2 + glob(*name) + state + b".")
            refused(tmp_path / "x", "sets the state")


@pytest.mark.parametrize(
    "body",
    [
        b")" + b"\x85" * 100_000,
        glob("collections", "OrderedDict") + b")\x81",  # NEWOBJ
        b"\x82\x01",  # EXT1
        b"(iposix\nsystem\n",  # INST
        b"tt",
        b"}" + text("a") + integer(3) + b"s",
    ],
)
def test_pickles_of_other_things(body, tmp_path):
    write(tmp_path / "x", PICKLE_2 + body + b".")
    refused(tmp_path / "x", "refused")


def test_keys_that_overflow_the_stack_when_they_are_hashed(tmp_path):
    """A chain of nested tuples built by fetching the last from the memo."""
    data = PICKLE_2 + b"()q\x00" + b"h\x00\x85q\x00" * 100_000 + b"t}h\x00Ns."
    write(tmp_path / "x", data)
    refused(tmp_path / "x", "keys that are not text")
    # A memo that Python's unpickler would allocate.
    write(tmp_path / "x", PICKLE_2 + b"}r\xff\xff\xff\x7f.")
    assert open_torch(str(tmp_path / "x")) == {}


def test_archives_that_are_none_of_torchs(tmp_path):
    good = dictionary(("x", tensor([6], [1])))
    path = tmp_path / "x"
    write(path, good, [("0", SIX.tobytes())], compression=zipfile.ZIP_DEFLATED)
    refused(path, "compressed")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", good)
        archive.writestr("b/data.pkl", good)
    refused(path, "exactly one data.pkl")
    write(path, good, [("0", SIX.tobytes())])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/byteorder", "big")
    refused(path, "big-endian")
    path.write_bytes(pickle.dumps({"x": 1}, 2))
    refused(path, r"before torch 1\.6.*torch\.save\(torch\.load")


def test_bytes_that_have_changed(tmp_path):
    path = one_tensor(tmp_path / "x", [6], [1])
    raw = bytearray(pathlib.Path(path).read_bytes())
    raw[raw.index(SIX.tobytes())] ^= 1
    pathlib.Path(path).write_bytes(raw)
    with pytest.raises(UserError, match="is damaged: Bad CRC-32"):
        read(open_torch(path), "x")


def test_a_directory_that_promises_more_bytes_than_there_are(tmp_path):
    path = one_tensor(tmp_path / "model.bin", (6,), (1,))
    raw = bytearray(pathlib.Path(path).read_bytes())
    entry = raw.index(b"PK\x01\x02")  # the first member is data.pkl
    raw[entry + 20 : entry + 28] = struct.pack("<II", 1 << 20, 1 << 20)
    pathlib.Path(path).write_bytes(raw)
    refused(path, "refused or damaged")


@settings(max_examples=300, deadline=None)
@given(body=st.lists(st.sampled_from([bytes([b]) for b in range(256)]), max_size=60))
def test_random_pickles_fail_closed(tmp_path_factory, body):
    path = tmp_path_factory.getbasetemp() / "random.bin"
    write(path, PICKLE_2 + b"".join(body) + b".")
    with contextlib.suppress(UserError):
        assert not open_torch(str(path))
