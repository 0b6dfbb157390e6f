"""Versions, peaks of memory and arithmetic, and products of few rows."""

import contextlib
import os
import platform as machine
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata

import jax
import jax.numpy as jnp

from medusa_jax.devices.platforms import platform
from medusa_jax.evaluate.tables import device_facts
from medusa_jax.model.product import product
from research.bandwidth import read_bandwidth
from research.hardware.record import Record

PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "flax", "optax", "orbax-checkpoint",
    "transformers", "numpy", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
)  # fmt: skip
SMI = "name,memory.total,driver_version,clocks.max.sm,clocks.mem,power.limit"
# Rows of a product; 1 is what plain decoding has.
ROWS = (1, 8, 16, 64, 128, 512)


def run(record: Record) -> None:
    """The machine, then what it reads, moves and multiplies in a second."""
    record.row("machine", **versions(), **device_facts(), platform=platform())
    gib = 0.02 if record.small else 4
    x = jax.random.normal(jax.random.key(0), (int(gib * 2**28),), jnp.float32)
    with record.trying("bandwidth"):
        s = seconds(jax.jit(lambda x: x + 1), x)
        record.row(
            "bandwidth", of="copy, read plus written", gb_per_second=2 * x.nbytes / s / 1e9
        )
        for n in (2**24, 2**30):
            record.row(
                "bandwidth", of=f"read {n >> 20} MiB", gb_per_second=read_bandwidth(n) / 1e9
            )
    del x
    for kind, n in (("bfloat16", 8192), ("float32", 8192), ("float64", 4096)):
        with record.trying("product", kind=kind):
            if kind == "float64":
                jax.config.update("jax_enable_x64", True)
            n = 256 if record.small else n
            a = jax.random.normal(jax.random.key(1), (n, n), kind)
            s = seconds(jax.jit(product), a, a)
            record.row("product", kind=kind, tflops=2 * n**3 / s / 1e12)
    jax.config.update("jax_enable_x64", False)
    with record.trying("rows"):
        few_rows(record)


def versions() -> dict[str, object]:
    """Packages, processor and, on an NVIDIA machine, its driver."""
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    smi = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"]
        smi = subprocess.run(
            query, capture_output=True, text=True, timeout=20
        ).stdout.strip()
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "python": machine.python_version(),
        "cores": os.cpu_count(),
        "packages": packages,
        "driver": smi,
        "memory_bytes": stats.get("bytes_limit"),
    }


def few_rows(record: Record) -> None:
    """Sixteen products in one program with the gate and up kernels of a 7B model, in bfloat16."""
    D, F, n = (256, 512, 2) if record.small else (4096, 22016, 16)
    kernels = [jax.random.normal(jax.random.key(i), (D, F), jnp.bfloat16) for i in range(n)]

    @jax.jit
    def chain(kernels: list[jax.Array], x_RD: jax.Array) -> jax.Array:
        for kernel in kernels:
            y = product(x_RD, kernel)[:, :D].astype(x_RD.dtype)
            x_RD = x_RD + y * jnp.asarray(1e-3, y.dtype)
        return x_RD

    for rows in ROWS:
        s = seconds(chain, kernels, jnp.ones((rows, D), jnp.bfloat16)) / n
        record.row(
            "rows", rows=rows, gb_per_second=2 * D * F / s / 1e9, microseconds=1e6 * s
        )


def seconds(function: Callable, *arguments: object) -> float:
    """Median seconds of a call, of five series of five."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(5):
            out = function(*arguments)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / 5)
    return statistics.median(times)
