"""With MEDUSA_JAX_WHEEL=linux_x86_64, or another platform tag, a wheel contains compiled kernels (README.md).

CXX names the compiler, as for kernels that are compiled where they run; a cross compiler works.
"""

import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PLATFORM = os.environ.get("MEDUSA_JAX_WHEEL", "")


class BuildKernels(build_py):
    def run(self):
        super().run()
        if PLATFORM:
            sys.path.insert(0, str(Path(__file__).parent))
            from medusa_jax.compiler import SHIPPED, VARIANTS, ship

            machine = next(name for name in VARIANTS if PLATFORM.endswith(name))
            ship(machine, Path(self.build_lib, "medusa_jax", "cpu", SHIPPED.name))


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return ("py3", "none", PLATFORM) if PLATFORM else super().get_tag()


setup(
    cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel},
    # XLA accepts kernels that were compiled with the headers of an earlier release.
    setup_requires=["jaxlib==0.10.1"] if PLATFORM else [],
)
