"""Reading torch's files: right on good ones, closed on everything else."""

import contextlib
import os
import pickle
import random
import struct
import zipfile
import zlib
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from medusa_jax.errors import UserError
from medusa_jax.files.tensor import read_rows, read_whole
from medusa_jax.files.torch_files import open_torch
from medusa_jax.files.torch_writer import save_torch

PICKLE_2 = b"\x80\x02"


def write(path, data_pkl, raw=None, **options):
    """A torch-like archive by hand; `raw` are the bytes of storage 0."""
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("archive/data.pkl", data_pkl)
        if raw is not None:
            archive.writestr("archive/data/0", raw)
    return path


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
RAW = SIX.tobytes()


def one_tensor(path, *args, raw=RAW, **kwargs):
    return write(path, dictionary(("x", tensor(*args, **kwargs))), raw)


def tensor_of(path):
    return open_torch(str(path))["x"]


KINDS = {"Half": "<f2", "BFloat16": ml_dtypes.bfloat16, "Double": "<f8", "Long": "<i8"}


def test_views_by_hand(tmp_path):
    """[[0, 1, 2], [3, 4, 5]] and its transpose, a part of it, and the same numbers in other types."""
    path = tmp_path / "x"
    found = read_whole(tensor_of(one_tensor(path, [2, 3], [3, 1])))
    np.testing.assert_array_equal(found, SIX.reshape(2, 3))
    turned = tensor_of(one_tensor(path, [3, 2], [1, 3]))
    np.testing.assert_array_equal(read_whole(turned), SIX.reshape(2, 3).T)
    np.testing.assert_array_equal(turned.read((slice(1, 2), slice(0, 2))), [[1, 4]])
    part = tensor_of(one_tensor(path, [2], [3], offset=2))
    np.testing.assert_array_equal(read_whole(part), [2, 5])
    for kind, dtype in KINDS.items():
        stored = {
            "store": storage(kind=f"{kind}Storage"),
            "raw": SIX.astype(dtype).tobytes(),
        }
        found = read_whole(tensor_of(one_tensor(path, [6], [1], **stored)))
        assert found.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(found, SIX.astype(dtype))


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
        ours = read_whole(tensors[name]).astype(np.float64)
        np.testing.assert_array_equal(ours, theirs.detach().double().numpy())
    # A state dict is an OrderedDict with an attribute.
    torch.save(torch.nn.Linear(3, 2).state_dict(), path)
    shapes = {name: x.shape for name, x in open_torch(path).items()}
    assert shapes == {"weight": (2, 3), "bias": (2,)}


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
    np.testing.assert_array_equal(read_whole(tensor_of(path)), x.numpy())


def fails(path, match):
    with refused(match):
        open_torch(str(path))


def test_code_is_refused_and_not_run(tmp_path):
    flag = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {flag}",)

    for protocol in range(5):
        fails(write(tmp_path / "x", pickle.dumps({"w": Evil()}, protocol)), "refused")
    for module, name in (
        ("builtins", "eval"),
        ("torch._utils", "_rebuild_sparse_tensor"),
        ("collections", "OrderedDict.fromkeys"),
        ("torch.serialization", "os.system"),
    ):
        data = PICKLE_2 + glob(module, name) + b"(" + text(f"touch {flag}") + b"tR."
        path = write(tmp_path / "x", data)
        fails(path, f"it asks for {module}.{name}, which no weights need")
    assert not flag.exists()


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [([1, 6], [10**25, 1], 0), ([6, 1], [1, 2**63 - 1], 0), ([0], [10**25], 10**25)],
)
def test_steps_that_are_never_taken(shape, strides, offset, tmp_path):
    """They overflowed where the tensor was read."""
    found = read_whole(tensor_of(one_tensor(tmp_path / "x", shape, strides, offset)))
    wanted = SIX if offset == 0 else SIX[:0]
    np.testing.assert_array_equal(found, wanted.reshape(shape))


@pytest.mark.parametrize(
    ("shape", "strides", "changes", "message"),
    [
        ([2, 3], [3, 1], {"offset": 1}, "beyond its storage"),
        ([2, 2], [5, 2], {}, "beyond its storage"),
        ([3, 6], [0, 1], {}, "more elements than its storage"),
        ([-1, -6], [1, 1], {}, "malformed tensor"),
        ([2, 3], [1], {}, "malformed tensor"),
        # No element, and a size in bytes that overflows.
        ([0, 2**31, 2**31], [1, 1, 1], {}, "more elements"),
        ([6], [1], {"raw": b"\0" * 23}, "cut short"),
        ([6], [1], {"store": storage(key="../../etc/passwd")}, "bytes of 'x' are missing"),
        ([6], [1], {"store": storage(size=-6)}, "malformed storage"),
        ([6], [1], {"store": integer(5)}, "malformed tensor"),
        ([6], [1], {"store": storage(kind="QInt8Storage")}, r"torch\.QInt8Storage"),
        ([6], [1], {"store": b"NQ"}, "refused"),
    ],
)
def test_views_out_of_bounds(shape, strides, changes, message, tmp_path):
    fails(one_tensor(tmp_path / "x", shape, strides, **changes), message)


def test_state_cannot_be_set_past_the_checks(tmp_path):
    """BUILD on a finished tensor or storage would change its bounds."""
    good = tensor([2, 3], [3, 1])
    states = [
        b"(" + storage() + integer(10**6) + numbers([2]) + numbers([1]) + b"tb",
        b"}" + text("offset") + integer(10**6) + b"sb",
        b"(N}" + text("offset") + integer(10**6) + b"stb",
    ]
    for state in states:
        path = write(tmp_path / "x", dictionary(("x", good + state)), RAW)
        fails(path, "sets the state of an object")
        fails(one_tensor(path, [6], [1], store=storage() + state), "sets the state")
        for name in (("torch", "FloatStorage"), ("torch._utils", "_rebuild_tensor_v2")):
            fails(write(path, PICKLE_2 + glob(*name) + state + b"."), "sets the state")


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
    fails(write(tmp_path / "x", PICKLE_2 + body + b"."), "refused")


def test_keys_that_overflow_the_stack_when_they_are_hashed(tmp_path):
    """A chain of nested tuples built by fetching the last from the memo."""
    data = PICKLE_2 + b"()q\x00" + b"h\x00\x85q\x00" * 100_000 + b"t}h\x00Ns."
    path = write(tmp_path / "x", data)
    fails(path, "keys that are not text")
    # A memo that Python's unpickler would allocate.
    assert open_torch(str(write(path, PICKLE_2 + b"}r\xff\xff\xff\x7f."))) == {}


def test_archives_that_are_none_of_torchs(tmp_path):
    good = dictionary(("x", tensor([6], [1])))
    path = tmp_path / "x"
    fails(write(path, good, RAW, compression=zipfile.ZIP_DEFLATED), "compressed")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", good)
        archive.writestr("b/data.pkl", good)
    fails(path, "exactly one data.pkl")
    write(path, good, RAW)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/byteorder", "big")
    fails(path, "big-endian")
    path.write_bytes(pickle.dumps({"x": 1}, 2))
    fails(path, r"before torch 1\.6.*torch\.save\(torch\.load")
    path.write_bytes(write(path, good, RAW).read_bytes()[:-9])
    fails(path, "cut short")
    for data in (b'{"choices": [[0]]}', b""):
        path.write_bytes(data)
        fails(path, "x has no weights in it$")


def test_parts_are_read_without_the_rest_of_their_storage(tmp_path):
    tensor = tensor_of(one_tensor(tmp_path / "x", [3, 2], [2, 1]))
    with patch("zlib.crc32", wraps=zlib.crc32) as checksum:
        np.testing.assert_array_equal(read_rows(tensor, np.array([2, 0])), [[4, 5], [0, 1]])
    assert checksum.call_count == 1


def test_bytes_that_have_changed(tmp_path):
    """A number, and the size that the archive's directory gives its first member, data.pkl."""
    path = one_tensor(tmp_path / "x", [6], [1])
    good = path.read_bytes()
    path.write_bytes(good.replace(RAW, (SIX + 1).tobytes()))
    with refused("is damaged: Bad CRC-32"):
        read_whole(tensor_of(path))
    sizes = good.index(b"PK\x01\x02") + 20
    more = struct.pack("<II", 1 << 20, 1 << 20)
    path.write_bytes(good[:sizes] + more + good[sizes + len(more) :])
    fails(path, "refused or damaged")


@settings(max_examples=300, deadline=None)
@given(body=st.lists(st.sampled_from([bytes([b]) for b in range(256)]), max_size=60))
def test_random_pickles_fail_closed(tmp_path_factory, body):
    path = tmp_path_factory.getbasetemp() / "random.bin"
    write(path, PICKLE_2 + b"".join(body) + b".")
    with contextlib.suppress(UserError):
        assert not open_torch(str(path))
