"""Products with kernels in blocks, against the same integers in NumPy: every bit, for any number of rows."""

import itertools
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned, wide
from gguf_files import SCALES, gguf, random_blocks

from medusa_jax.compiler import FLAGS, SOURCES
from medusa_jax.cpu.blocks import pack_blocks, packs
from medusa_jax.cpu.panels import FORMS, Panels, in_blocks, panels
from medusa_jax.model.stored import Storage
from medusa_jax.native import library

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")
# The compilers of Linux and of macOS.
ARM = {
    "armv8-a": "aarch64-linux-gnu-g++", "armv8.2-a+dotprod": "aarch64-linux-gnu-g++",
    "armv8.6-a+i8mm": "aarch64-linux-gnu-g++", "armv8.4-a+dotprod": "clang++ --target=aarch64-linux-gnu",
}  # fmt: skip
EMULATOR = "qemu-aarch64"
KINDS = [name for name, number in FORMS.items() if number > 4]
# Where blocks of a type have their codes, and the weight that codes of ones are with a scale of 1.
CODES = {
    "Q4_0": (slice(2, 18), 7), "Q4_1": (slice(4, 20), 15), "Q5_0": (slice(2, 22), 15),
    "Q5_1": (slice(4, 24), 31), "Q8_0": (slice(2, 34), -1), "Q4_K": (slice(16, 144), 15),
    "Q5_K": (slice(16, 176), 31), "Q6_K": (slice(0, 192), 31),
}  # fmt: skip


def unpacked(rows, kind):
    """By the `gguf` package: [outputs, inputs]."""
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])


def block_of(kind):
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]


def integers(rows, kind):
    """Codes [outputs, inputs], their scales and minima [outputs, inputs]: what the `gguf` package
    unpacks if d and m of all blocks, or their codes, are others."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    places = SCALES.get(kind, (0,))

    def read(d, m, codes=None):
        blocks = rows.reshape(len(rows), -1, size).copy()
        for at, number in zip(places, (d, m)):
            blocks[..., at : at + 2] = np.float16([number]).view(np.uint8)
        if codes is not None:
            blocks[..., CODES[kind][0]] = codes
        return unpacked(blocks.reshape(len(rows), -1), kind)

    def halves(at):
        found = rows.reshape(len(rows), -1, size)[..., at : at + 2].copy()
        found = found.view(np.float16).astype(np.float32)[..., 0]
        return found.repeat(block_of(kind), axis=1)

    scales = read(1, 0, 255) / CODES[kind][1]
    codes = np.divide(read(1, 0), scales, out=np.zeros_like(scales), where=scales != 0)
    minima = read(0, 1) * halves(places[1]) if len(places) > 1 else None
    return codes.astype(np.int64), halves(places[0]) * scales, minima


def fused(a, b, c):
    """a * b + c in float32, rounded once: the sum in float64 rounds to odd before."""
    a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
    product = a * b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    toward = np.where(error > 0, np.inf, -np.inf)
    even = total.view(np.int64) % 2 == 0
    total = np.where((error != 0) & even, np.nextafter(total, toward), total)
    return total.astype(np.float32)


def rounded(x, bits):
    """x [rows, inputs] as integers [rows, blocks, 32] and scales [rows, blocks]."""
    top = np.float32({8: 127, 16: 32639}[bits])
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    most = np.abs(x).max(axis=-1)
    none = most < np.float32(1e-30)
    most = np.where(none, np.float32(1), most)
    by, scale = np.where(none, 0, top / most), np.where(none, 0, most / top)
    return np.rint(x * by[..., None].astype(np.float32)), scale.astype(np.float32)


def wanted(x, bits, codes, scales, minima, group):
    """The product by integer sums and one multiply-add for each `group` of inputs, in their order."""
    q, scale = rounded(x, bits)
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 32)))
    y = np.zeros((len(x), len(codes)), np.float32)
    for block in range(q.shape[1]):
        for begin in range(0, 32, group):
            at = block * 32 + begin
            part = q[:, block, begin : begin + group].astype(np.int64)
            sums = part @ codes[:, at : at + group].T
            assert np.abs(sums).max() < 2**31
            each = scales[:, at] * scale[:, block, None]
            y = fused(sums.astype(np.float32), each, y)
        if minima is not None:
            total = scale[:, block] * q[:, block].sum(axis=1).astype(np.float32)
            y = fused(minima[:, block * 32], total[:, None], y)
    return y


def activations(rows, inputs, rng):
    """Rows of the usual size; blocks of zeros, of tiny, of huge and of the largest values, with both signs and with one; lone ones."""
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    first = x[:, :32]
    for row, by in enumerate((0, 1e-36, 1e-20, 1e15)):
        first[row::7] *= np.float32(by)
    x[4::7] = np.sign(x[4::7]) * 3
    x[5::7, 1:] = 0
    x[6::7] = 3
    return x


def bits_of(x):
    return np.asarray(x).view(np.uint32)


# Each pair compiles its own library, which takes a few seconds.
@pytest.mark.parametrize(
    ("kind", "bits"), thinned(itertools.product(KINDS, (16, 8)), ("Q4_0", 16), ("Q6_K", 8))
)
@pytest.mark.parametrize(
    ("outputs", "n_blocks"), [(97, 3), *wide((1, 1), (33, 2), (150, 5), (64, 9))]
)
def test_every_sum_is_that_of_integers(kind, bits, outputs, n_blocks):
    """For each number of few rows, and of many; and outputs are unpacked one at a time as float32."""
    rng = np.random.default_rng(outputs)
    inputs = n_blocks * block_of(kind)
    rows = random_blocks(kind, outputs, inputs, rng)
    words = jnp.asarray(pack_blocks(kind, rows, inputs))
    kernel = Panels(words, None, kind, inputs, outputs, bits)
    ids = jnp.asarray(rng.permutation(outputs))
    got = jax.jit(lambda ids: kernel.rows(ids))(ids)
    np.testing.assert_array_equal(bits_of(got), bits_of(unpacked(rows, kind)[ids]))
    x = activations(139, inputs, rng)
    y = kernel.product(x)
    group = 16 if kind == "Q6_K" else 32
    np.testing.assert_array_equal(y, wanted(x, bits, *integers(rows, kind), group))
    for n in (*range(1, 18), *range(31, 42)):
        np.testing.assert_array_equal(bits_of(kernel.product(x[:n])), bits_of(y[:n]))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(("inputs", "outputs"), [(67, 97), *wide((1, 1), (601, 33))])
def test_every_sum_with_int8_is_that_of_integers(inputs, outputs, bits):
    """A scale for each output, by which the sums are multiplied; inputs that fill no block."""
    rng = np.random.default_rng(inputs)
    codes = rng.integers(-127, 128, (inputs, outputs)).astype(np.int8)
    codes[:, 0] = 127
    scales = rng.random(outputs).astype(np.float32)
    kernel = panels(jnp.asarray(codes), jnp.asarray(scales), Storage(activations=bits))
    x = activations(70, inputs, rng)
    ones = np.ones((outputs, inputs + 32), np.float32)
    sums = wanted(x, bits, codes.T.astype(np.int64), ones, None, 32)
    for n in (1, 2, 3, 5, 70):
        np.testing.assert_array_equal(kernel.product(x[:n]), sums[:n] * scales)


def check_program(path, compiler, options, runs):
    """`products.cc`, compiled for a machine: every block type, row and number of bits."""
    source = Path(__file__).with_name("products.cc")
    command = [*compiler, *FLAGS, *options, f"-I{SOURCES}", source]
    subprocess.run([*command, "-o", path], check=True)
    rng = np.random.default_rng(0)
    for kind, bits in itertools.product(["int8", *KINDS], (16, 8)):
        group, outputs, floats = 16 if kind == "Q6_K" else 32, 70, b""
        if kind == "int8":
            codes = rng.integers(-127, 128, (outputs, 67)).astype(np.int8)
            words = np.asarray(in_blocks(jnp.asarray(codes.T)))
            parts = codes.astype(np.int64), np.ones((outputs, 96), np.float32), None
        else:
            rows = random_blocks(kind, outputs, 2 * block_of(kind), rng)
            words = pack_blocks(kind, rows, 2 * block_of(kind))
            parts, floats = integers(rows, kind), unpacked(rows, kind).tobytes()
        x = activations(7, parts[0].shape[1], rng)
        numbers = map(str, (FORMS[kind], bits, *x.shape, outputs))
        given = words.tobytes() + x.tobytes()
        got = subprocess.run(
            [*runs, path, *numbers], input=given, stdout=subprocess.PIPE, check=True
        ).stdout
        y = wanted(x, bits, *parts, group)
        assert got == b"".join(y[:n].tobytes() for n in range(1, 8)) + floats, (kind, bits)


@pytest.mark.wide
def test_every_sum_without_xla(tmp_path):
    quickly_compiled = ["-march=native", "-O0"]
    check_program(tmp_path / "products", ["c++"], quickly_compiled, [])


@pytest.mark.wide
@pytest.mark.parametrize("machine", ARM)
def test_every_sum_on_arm(machine, tmp_path):
    """Without products of bytes, with them, and with matrices of them."""
    compiler = ARM[machine].split()
    for program in (EMULATOR, compiler[0], "aarch64-linux-gnu-g++"):
        if not shutil.which(program):
            pytest.skip(f"no {program}")
    options = [f"-march={machine}", "-static"]
    check_program(tmp_path / "products", compiler, options, [EMULATOR, "-cpu", "max"])


@pytest.mark.parametrize("bits", [16, 8])
def test_what_is_not_finite_is_seen_in_its_row_only(bits):
    rng = np.random.default_rng(0)
    rows = random_blocks("Q4_0", 40, 96, rng)
    words = jnp.asarray(pack_blocks("Q4_0", rows, 96))
    kernel = Panels(words, None, "Q4_0", 96, 40, bits)
    x = rng.standard_normal((6, 96)).astype(np.float32)
    clean = np.asarray(kernel.product(x))
    for row, value in ((1, np.nan), (3, np.inf), (4, -np.inf)):
        x[row, 40 + row] = value
    y = np.asarray(kernel.product(x))
    assert np.isnan(y[[1, 3, 4]]).all()
    np.testing.assert_array_equal(y[[0, 2, 5]], clean[[0, 2, 5]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_no_number_is_refused(kind):
    rows = random_blocks(kind, 3, 512, np.random.default_rng(0))
    at = 512 // 256 * 210 - 2 if kind == "Q6_K" else 0  # the last block's, or the first's
    rows[1, at : at + 2] = np.float16(np.nan).reshape(1).view(np.uint8)
    assert pack_blocks(kind, rows, 512) is None


def test_what_has_no_panels_in_blocks():
    assert packs("Q4_1", 96) and packs("Q4_K", 512)
    assert not packs("Q4_K", 96) and not packs("IQ4_XS", 256) and not packs("F16", 32)
