"""Products with kernels in blocks at length: 10^8 outputs, not a bit that differs from float32's."""

import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import gguf, random_blocks
from test_blocks import KINDS, bits, unpacked

from medusa_jax.cpu import library
from medusa_jax.cpu.blocks import pack_blocks
from medusa_jax.cpu.panels import in_panels, panel_product

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library() is None, reason="no C++ compiler"),
]
OUTPUTS = 10**8


def test_no_bit_differs():
    """All types, odd numbers of outputs, 1 to 40 rows: paired panels, registers and unpacked panels."""
    rng, compared = np.random.default_rng(0), 0
    while compared < OUTPUTS:
        for kind in KINDS:
            block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
            outputs = int(rng.integers(2000, 6000))
            inputs = block * int(rng.integers(1, 1 + 1024 // block))
            rows = random_blocks(kind, outputs, inputs, rng)
            words = jnp.asarray(pack_blocks(kind, rows, inputs))
            floats = in_panels(jnp.asarray(unpacked(rows, kind).T), library().panel)
            for n in range(1, 41):
                x = rng.standard_normal((n, inputs)).astype(np.float32)
                own = panel_product(x, words, ((kind, outputs),))
                wanted = panel_product(x, floats, (("float32", outputs),))
                np.testing.assert_array_equal(bits(own), bits(wanted))
                compared += own.size
    print(f"{compared} outputs compared, 0 bits differ")
