"""A platform's wheel: its kernels run where there is no compiler, with the bits of kernels compiled here."""

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from medusa_jax.compiler import VARIANTS, shipped
from medusa_jax.devices.machine import processor
from medusa_jax.native import library

ROOT = Path(__file__).parents[2]
CHILD = """
import hashlib, pathlib
import numpy as np
from medusa_jax.compiler import PARTS
from medusa_jax.native import library, loaded
from medusa_jax.cpu.panels import Panels, in_panels

native, digest = library(), hashlib.sha256()
for form, number, bits in PARTS.values():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((7, 256)).astype(np.float32)
    if bits == 0:
        words = in_panels(rng.standard_normal((256, 70)).astype(form), loaded().panel)
    else:
        n = native.call("medusa_packed_words", number, 70, 256)
        words = rng.integers(0, 2**32, n, np.uint32) & 0x3FFF3FFF  # scales are finite
    y = np.asarray(Panels(words, None, form, 256, 70, bits or 16).product(x))
    assert np.isfinite(y).all() and y.any(), form
    digest.update(y.tobytes())
print(pathlib.Path(native.path).stem, digest.hexdigest())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    tag = f"linux_{platform.machine()}"
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT]
    subprocess.run(build, check=True, env={**os.environ, "MEDUSA_JAX_WHEEL": tag})
    [file] = folder.glob(f"*-py3-none-{tag}.whl")
    zipfile.ZipFile(file).extractall(folder)
    return folder


def stem_and_digest(folder, cache, **variables):
    """The name of the kernels that the package in a folder uses, and a checksum of their products."""
    variables = {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(cache), **variables}
    run = [sys.executable, "-c", CHILD]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    return subprocess.check_output(run, cwd=cache, env=env, text=True).split()


@pytest.mark.slow
@pytest.mark.skipif(library() is None or sys.platform != "linux", reason="no compiler")
def test_kernels_of_a_wheel(wheel, tmp_path):
    variants = VARIANTS[platform.machine()]
    built = {path.stem for path in (wheel / "medusa_jax/cpu/compiled").iterdir()}
    assert built == set(variants) and shipped() is None, "a clone has none"
    compiled, digest = stem_and_digest(ROOT, tmp_path)
    assert compiled.startswith("kernels-")
    has = set(processor().split())
    best = next(
        name for name, (_, needed) in variants.items() if has.issuperset(needed.split())
    )
    limits = {"": best, "AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}
    for limit, name in limits.items():
        if name in variants and has.issuperset(variants[name][1].split()):
            flags = f"--xla_cpu_max_isa={limit}" if limit else ""
            empty = {"PATH": "", "CXX": "", "XLA_FLAGS": flags}
            assert stem_and_digest(wheel, tmp_path, **empty) == [name, digest], limit
