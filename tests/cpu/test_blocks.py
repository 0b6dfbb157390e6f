"""Kernels in the blocks of GGUF files give the bits that they give unpacked to float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from gguf_files import gguf, random_blocks

from medusa_jax.cpu import library
from medusa_jax.cpu.blocks import pack_blocks, packs
from medusa_jax.cpu.panels import FORMS, Panels, in_panels, panel_product

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")
KINDS = [name for name, number in FORMS.items() if number > 4]
# Rows that are unpacked in registers, in pairs of panels and not, and rows that are too many for that.
ROWS = (1, 2, 5, 8, 9, 30)


def unpacked(rows, kind):
    """By the `gguf` package: [outputs, inputs]."""
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])


def bits(x):
    return np.asarray(x).view(np.uint32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("outputs", "n_blocks"), [(97, 3), *wide((1, 1), (33, 2), (150, 5), (64, 9))]
)
def test_every_bit_is_that_of_float32(kind, outputs, n_blocks):
    """Unpacked one output at a time, and in products with any number of rows."""
    rng = np.random.default_rng(outputs)
    inputs = n_blocks * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    rows = random_blocks(kind, outputs, inputs, rng)
    expected = unpacked(rows, kind)
    words = jnp.asarray(pack_blocks(kind, rows, inputs))
    floats = in_panels(jnp.asarray(expected.T), library().panel)
    ids = jnp.asarray(rng.permutation(outputs))
    kernel = Panels(words, None, ((kind, outputs),), inputs)
    got = jax.jit(lambda ids: kernel.rows(ids))(ids)
    np.testing.assert_array_equal(bits(got), bits(expected[ids]))
    x = rng.standard_normal((max(ROWS), inputs)).astype(np.float32)
    for n in ROWS:
        own, wanted = (
            panel_product(x[:n], panels, ((form, outputs),))
            for panels, form in ((words, kind), (floats, "float32"))
        )
        np.testing.assert_array_equal(bits(own), bits(wanted))


def test_parts_of_several_types():
    """As queries, keys and values of one kernel may be; none fills its last panel."""
    rng, inputs, widths = np.random.default_rng(0), 256, (40, 70, 3)
    words, weights, parts = [], [], []
    for kind, outputs in zip(("Q6_K", "float32", "Q4_K"), widths):
        rows = random_blocks("Q4_0" if kind == "float32" else kind, outputs, inputs, rng)
        weights.append(unpacked(rows, "Q4_0" if kind == "float32" else kind))
        if kind == "float32":
            words.append(in_panels(jnp.asarray(weights[-1].T), library().panel).ravel())
        else:
            words.append(pack_blocks(kind, rows, inputs))
        parts.append((kind, outputs))
    x = rng.standard_normal((3, inputs)).astype(np.float32)
    got = panel_product(x, jnp.concatenate(words), tuple(parts))
    floats = in_panels(jnp.asarray(np.concatenate(weights).T), library().panel)
    wanted = panel_product(x, floats, (("float32", sum(widths)),))
    np.testing.assert_array_equal(bits(got), bits(wanted))
    swapped = tuple(parts[::-1])
    with pytest.raises(Exception, match="do not fit"):
        jax.block_until_ready(panel_product(x, jnp.concatenate(words)[:-1], swapped))


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_no_number_is_refused(kind):
    rows = random_blocks(kind, 3, 512, np.random.default_rng(0))
    at = 512 // 256 * 210 - 2 if kind == "Q6_K" else 0  # the last block's, or the first's
    rows[1, at : at + 2] = np.float16(np.nan).reshape(1).view(np.uint8)
    assert pack_blocks(kind, rows, 512) is None


def test_what_has_no_panels_in_blocks():
    assert packs("Q4_1", 96) and packs("Q4_K", 512)
    assert not packs("Q4_K", 96) and not packs("IQ4_XS", 256) and not packs("F16", 32)
