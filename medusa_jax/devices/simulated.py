"""Simulated devices."""

import os

import jax


def simulate_devices(n: int) -> None:
    """Simulate n CPU devices; call before any JAX computation.

    XLA's default CPU scheduler maximises concurrency, and gathers the weights of many layers before
    it needs the first. This selects the other scheduler, unless XLA_FLAGS already chooses one.
    """
    scheduler = "xla_cpu_enable_concurrency_optimized_scheduler"
    flags = os.environ.get("XLA_FLAGS", "")
    if scheduler not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{scheduler}=false"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n)
