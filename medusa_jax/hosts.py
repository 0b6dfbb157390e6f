"""Several processes as one program: how they find each other, agree when to stop, and end."""

import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from medusa_jax.console import inform
from medusa_jax.errors import UserError

# Command line flags, as `jax.distributed.initialize` calls them.
FLAGS = ("coordinator_address", "num_processes", "process_id")
# On virtual machines with TPUs the environment says nothing, JAX asks the machine.
TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
# Exit status where another process is lost: try again (EX_TEMPFAIL of sysexits.h).
LOST = 75
# What passes the devices at a time on its way to the hosts.
PIECE_BYTES = 64 * 2**20


def join(given: Mapping[str, str]) -> None:
    """Join the other processes of this run, if there are any; before anything touches a device.

    JAX reads addresses and numbers from SLURM, Open MPI, Cloud TPU and GKE; elsewhere all three
    `FLAGS` are given. A process that no launcher started beside others runs alone.

    Raises:
      UserError: some of the flags are missing or no numbers, or nobody answers.
    """
    if given and set(given) != set(FLAGS):
        missing = [f"--{name}" for name in FLAGS if name not in given]
        raise UserError(
            f"several processes need all of {_flags()}: {missing[0]} is missing"
        )
    perhaps = not given and not launched(os.environ)
    if perhaps and not any(os.path.exists(path) for path in TPU_DEVICES):
        return
    try:
        numbers: dict[str, Any] = {name: int(given[name]) for name in FLAGS[1:] if given}
    except ValueError:
        raise UserError("--num_processes and --process_id are whole numbers") from None
    try:
        jax.distributed.initialize(given.get("coordinator_address"), **numbers)
    except (RuntimeError, ValueError) as error:
        if perhaps and isinstance(error, ValueError):
            return  # a TPU that belongs to no pod
        raise UserError(
            f"the processes of this run did not meet: {_first(error)}"
        ) from error


def launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher that JAX knows has started this process as one of several."""

    def several(name: str) -> bool:
        return environment.get(name, "").isdigit() and int(environment[name]) > 1

    # `srun` sets both; a shell inside an allocation has the number of tasks alone.
    slurm = several("SLURM_NTASKS") and "SLURM_STEP_NODELIST" in environment
    workers = environment.get("TPU_PROCESS_ADDRESSES") or environment.get(
        "TPU_WORKER_HOSTNAMES", ""
    )
    gke = "," in workers or several("MEGASCALE_NUM_SLICES")
    return slurm or gke or several("OMPI_COMM_WORLD_SIZE")


def first() -> bool:
    """Whether this process is the one that writes results, logs and pictures."""
    return jax.process_index() == 0


def on_host(x: Any) -> np.ndarray:
    """A whole array; where other processes hold parts of it, all of them must ask for it.

    It passes the devices in pieces, so that none of them holds the whole.
    """
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    rows = max(1, PIECE_BYTES * len(x) // x.nbytes)

    def piece(i: int) -> np.ndarray:
        part = jax.lax.slice_in_dim(x, i, min(i + rows, len(x)))
        return multihost_utils.process_allgather(part, tiled=True)

    return np.concatenate([piece(i) for i in range(0, len(x), rows)])


def asked_to_stop(step: int) -> bool:
    """Whether all processes stop after `step`, because one of them was sent SIGTERM.

    JAX's coordination service agrees on a step that none has passed yet, so every process has to
    ask after each step. A process that is alone has no such service.
    """
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)


@contextmanager
def together() -> Iterator[None]:
    """Ends this process at once, in a sentence, if it fails or another one is lost in the block.

    Without another one a collective operation fails, or waits until JAX's service has missed
    enough heartbeats and ends the process itself. A normal end would wait for all others, which
    may be waiting for this one.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        status, words = 2, str(error)
        if isinstance(error, jax.errors.JaxRuntimeError) and not _memory(error):
            status = LOST
            words = (
                f"another process of this run is lost ({_first(error)}); start all processes "
                "again with the same command: they go on from the last complete checkpoint"
            )
        elif not isinstance(error, UserError):
            traceback.print_exc()
            status, words = 1, "this process failed, and with it the run"
        inform(f"error: {words}")
        sys.stdout.flush()
        os._exit(status)


def _memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def _first(error: Exception) -> str:
    """The first line of what an error says, cut to a sentence's length."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _flags() -> str:
    return ", ".join(f"--{name}" for name in FLAGS)
