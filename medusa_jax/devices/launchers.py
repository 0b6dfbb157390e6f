"""Whether this process is one of several, by flags, launchers and the machine. Does not start JAX."""

import os
from collections.abc import Mapping

from medusa_jax.devices.machine import accelerator


def is_alone(flags: Mapping[str, str]) -> bool:
    """Whether this process has no others to join (`hosts.join`).

    Args:
      flags: the flags that name the others.
    """
    if flags or launched(os.environ):
        return False
    # TPU virtual machines may set no environment variables; JAX asks the machine.
    return accelerator() != "tpu" or bool(tpu_workers(os.environ))


def launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher that JAX knows started this process as one of several."""

    def above_one(name: str) -> bool:
        return environment.get(name, "").isdigit() and int(environment[name]) > 1

    # `srun` sets both; a shell inside an allocation has only the number of tasks.
    slurm = above_one("SLURM_NTASKS") and "SLURM_STEP_NODELIST" in environment
    gke = "," in tpu_workers(environment) or above_one("MEGASCALE_NUM_SLICES")
    return slurm or gke or above_one("OMPI_COMM_WORLD_SIZE")


def tpu_workers(environment: Mapping[str, str]) -> str:
    """The hosts of a TPU slice, separated by commas in the environment, "" if unknown; "local" in notebooks."""
    addresses = environment.get("TPU_PROCESS_ADDRESSES")
    return addresses or environment.get("TPU_WORKER_HOSTNAMES", "")
