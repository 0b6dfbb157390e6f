"""Tests run on the CPU, refuse silent rank promotion and keep compiled programs between runs."""

import gc
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nearly all of the tests' time is compilation. Without XLA's costly passes, in one piece a program
# and with the older code generator for fusions (jaxlib 0.11 has it no more, and ends a process that
# asks for it), it takes a fifth. JAX_DISABLE_MOST_OPTIMIZATIONS=0 compiles as users do.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1":
    quick = "--xla_cpu_parallel_codegen_split_count=1 "
    if version("jaxlib").startswith("0.10."):
        quick += "--xla_cpu_use_fusion_emitters=false "
    os.environ["XLA_FLAGS"] = quick + os.environ.get("XLA_FLAGS", "")
# Which products and which tree are fastest is measured; a test that is about them says which.
os.environ.setdefault("MEDUSA_JAX_PRODUCTS", "plain")
os.environ.setdefault("MEDUSA_JAX_TREES", "bundled")
# Workers, subprocesses and later runs share what was compiled.
if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    try:
        cache = home / "medusa_jax" / "tests"
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written
        cache = Path(tempfile.mkdtemp(prefix="medusa_jax_tests"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
# Writing a program there takes as long as compiling a small one.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.15"
# Where in the source an operation is written is looked up and written into every program: 4% of its time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
# Tracing makes so many small objects that Python looks for circles in them for an eighth of the time.
gc.set_threshold(100_000, 50, 50)


def restored_x64():
    """`x64` and `load(dtype="float64")` switch the whole process; the next test must not notice."""
    before = jax.config.jax_enable_x64
    yield
    if jax.config.jax_enable_x64 != before:
        jax.config.update("jax_enable_x64", before)


# The fixtures of a module load, too, before those of its first test are asked for.
_after_a_test = pytest.fixture(restored_x64, autouse=True)
_after_a_module = pytest.fixture(restored_x64, autouse=True, scope="module")


def pytest_addoption(parser):
    parser.addoption(
        "--drafter", help="a drafter as module:Class, which test_contract.py tests alone"
    )


def pytest_configure(config):
    name = config.getoption("--drafter")
    if name:
        os.environ["MEDUSA_JAX_TEST_DRAFTER"] = name


@pytest.fixture(autouse=True, scope="module")
def _drop_programs():
    """Let go of compiled programs where they have become many.

    JAX keeps the last 2,048 lowered ones, each with a separate MLIR context, and making
    another looks at all of them: after 2,000 programs one of a single addition takes
    23 ms instead of 17. Every program keeps its code mapped as well, in about three pieces; at
    `vm.max_map_count` (often 65530) a process crashes.
    """
    yield
    try:
        maps = Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:  # no Linux
        return
    if maps > 4_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def x64():
    """64-bit types, in which decoding is exact, until the test has ended."""
    jax.config.update("jax_enable_x64", True)


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """A tiny model without a chat template, heads in it; only to be read."""
    from tiny import write_model

    path = tmp_path_factory.mktemp("tiny")
    write_model(path)
    return path


@pytest.fixture(scope="session")
def chatty(tmp_path_factory):
    """The same with a chat template."""
    from tiny import write_chat_model

    path = tmp_path_factory.mktemp("chatty")
    write_chat_model(path)
    return path


@pytest.fixture(scope="session")
def files(directory, tmp_path_factory):
    """This model's directory, and a file of prompts."""
    from files import PROMPTS, write_lines

    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    return directory, write_lines(prompts, ({"prompt": p} for p in PROMPTS))
