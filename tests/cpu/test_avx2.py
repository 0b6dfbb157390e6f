"""The kernels as a processor without AVX-512 compiles them. Products in blocks equal the same sums in NumPy, so
they have the same bits on all processors."""

import os
import platform
import shutil
from pathlib import Path

import pytest
from children import output_of

from medusa_jax.devices.machine import processor
from medusa_jax.native import library

CHILD = """
import sys

import pytest

from medusa_jax.native import library

assert library().panel == 16, "two vectors of eight"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
# Products with rows that fill the registers of AVX2 and not, a layer, bits in any company, and blocks.
CHOSEN = "13-50-150 or 50-601-33 or (fused_layer_call and int8) or every_number or (every_sum and (97-3 or 67-97))"


@pytest.mark.wide
@pytest.mark.skipif(
    library() is None or platform.machine() != "x86_64", reason="no x86 compiler"
)
def test_the_kernels_built_for_avx2():
    """XLA's limit on instructions holds for the kernels. Tuned for Zen 2, where GCC would split some multiply-adds."""
    if "avx2" not in processor():
        pytest.skip("this processor has no AVX2")
    here = Path(__file__)
    tests = [here.with_name(name) for name in ("test_native.py", "test_blocks.py")]
    compiler = f"{os.environ.get('CXX') or shutil.which('c++')} -mtune=znver2"
    output_of(CHILD, *tests, "-k", CHOSEN, xla_flags="--xla_cpu_max_isa=AVX2", CXX=compiler)
