"""Several processes as one program: joining, agreeing to stop, and failing together."""

import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import ArrayLike

from medusa_jax.console import call_if_longer, inform
from medusa_jax.devices.launchers import is_alone, launched
from medusa_jax.errors import UserError, first_line
from medusa_jax.sharding import PyTree

# Command line flags, named as in `jax.distributed.initialize`.
FLAGS = ("coordinator_address", "num_processes", "process_id")
# Exit status when another process is lost or never joined: try again (EX_TEMPFAIL of sysexits.h).
LOST = 75
# Bytes per piece when arrays are gathered to hosts through the devices.
PIECE_BYTES = 64 * 2**20
# Seconds without a heartbeat after which JAX's service ends the other processes: SIGABRT (status 134), its
# message on stderr.
HEARTBEAT = 60
# Most seconds for a step: a process that is alive but stuck blocks all others.
STALLED = 1800.0


def join(given: Mapping[str, str]) -> None:
    """Join the other processes of this run, if any; call before any use of a device.

    JAX reads addresses and numbers from SLURM, Open MPI, Cloud TPU and GKE; elsewhere all three
    `FLAGS` are needed. Without flags and launcher the process runs alone. If no other process answers,
    this one exits with status `LOST`.

    Raises:
      UserError: some of the flags are missing or not numbers.
    """
    if given and set(given) != set(FLAGS):
        missing = [f"--{name}" for name in FLAGS if name not in given]
        flags = ", ".join(f"--{name}" for name in FLAGS)
        raise UserError(f"several processes need all of {flags}: {missing[0]} is missing")
    if is_alone(given):
        return
    try:
        numbers = {name: int(given[name]) for name in FLAGS[1:] if given}
    except ValueError:
        raise UserError("--num_processes and --process_id are whole numbers") from None
    try:
        jax.distributed.initialize(
            given.get("coordinator_address"),
            numbers.get("num_processes"),
            numbers.get("process_id"),
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    except RuntimeError as error:
        # The others may be late, for example on machines that are still starting.
        _leave(LOST, f"the processes of this run did not meet: {first_line(error)}")
    except (OSError, ValueError) as error:
        if not given and not launched(os.environ):
            return  # a single TPU machine, or a notebook's, which has no metadata server
        raise UserError(
            f"this process does not know the others: {first_line(error)}"
        ) from error


def first() -> bool:
    """Whether this is process 0, which writes results, logs and pictures."""
    return jax.process_index() == 0


@contextmanager
def one_prints() -> Iterator[None]:
    """Let only process 0 print to standard output inside the block."""
    if first():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


@contextmanager
def locked(directory: str | Path, waiting: str = "") -> Iterator[None]:
    """Lock `directory` against other programs during the block; process 0 holds the lock.

    The system releases the lock when its process ends, even by SIGKILL; the empty file may remain.

    Args:
      waiting: message while another program holds the lock; without one that is an error.

    Raises:
      UserError: another program holds the lock, or the directory is not writable.
    """
    if not first():
        yield
        return
    import filelock

    lock = filelock.FileLock(Path(directory) / ".lock")
    try:
        os.makedirs(directory, exist_ok=True)
        lock.acquire(blocking=False)
    except filelock.Timeout:
        if not waiting:
            raise UserError(
                f"{directory} is in use by another process: wait until it ends or use another "
                "directory"
            ) from None
        inform(waiting)
        lock.acquire()
    except NotImplementedError:
        inform(f"note: {directory} has no file locks: start no second program on it")
    except OSError as error:
        shown = str(directory) or "''"
        raise UserError(f"{shown} cannot be written to: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def broadcast_from_first(x: ArrayLike) -> np.ndarray:
    """Broadcast the array of process 0; all processes must call this with the same shape.

    For values from a disk or a clock: processes with different values would run different programs.
    """
    return np.asarray(multihost_utils.broadcast_one_to_all(np.asarray(x)))


def on_host(x: ArrayLike) -> np.ndarray:
    """Gather a whole array to the host; all processes that hold parts of it must call this.

    It is gathered in pieces, so that no device holds all of it.
    """
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    rows = max(1, PIECE_BYTES * len(x) // x.nbytes)

    def piece(i: int) -> np.ndarray:
        part = jax.lax.slice_in_dim(x, i, min(i + rows, len(x)))
        return multihost_utils.process_allgather(part, tiled=True)

    return np.concatenate([piece(i) for i in range(0, len(x), rows)])


def numbers(arrays: PyTree) -> dict[str, Any]:
    """A dictionary of arrays as numbers and lists of numbers; all processes must call this."""
    return {name: on_host(x).tolist() for name, x in arrays.items()}


def asked_to_stop(step: int) -> bool:
    """Whether all processes stop after `step`, because one of them received SIGTERM.

    JAX's coordination service agrees on one step that no process has passed yet, so every process has
    to ask after each step and number its steps consecutively. A single process has no such service.
    """
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)


@contextmanager
def fail_together() -> Iterator[None]:
    """If this process or a collective operation fails inside the block, print one line and exit.

    Without a peer, collective operations fail or wait for ever. A normal exit would wait for all other
    processes, which may be waiting for this one.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        if lost(error):
            _leave(LOST, _lost_message(first_line(error)))
        elif isinstance(error, UserError):
            _leave(2, str(error))
        else:
            traceback.print_exc()
            _leave(1, "this process failed, and with it the run")


def lost(error: BaseException | None) -> bool:
    """Whether an error is a device failure of the kind that the loss of another process causes."""
    # jaxlib raises either type; messages start with a status: "UNKNOWN: Gloo ...".
    runtime = isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and re.match(r"[A-Z_]+: ", str(error)) is not None
    )
    return runtime and jax.process_count() > 1 and "RESOURCE_EXHAUSTED" not in str(error)


def wait(x: PyTree) -> None:
    """Wait until the devices have computed `x`; exit if other processes block it for too long."""
    if jax.process_count() == 1:
        jax.block_until_ready(x)
        return
    message = _lost_message(f"no step was finished in {STALLED / 60:.0f} minutes")
    with call_if_longer(STALLED, lambda: _leave(LOST, message)):
        jax.block_until_ready(x)


def _lost_message(reason: str) -> str:
    return (
        f"another process of this run is lost ({reason}); start all processes again with the "
        "same command: they resume from the last checkpoint or batch"
    )


def _leave(status: int, message: str) -> None:
    """Print one line and exit at once, without waiting for threads or other processes."""
    inform(f"error: {message}")
    sys.stdout.flush()
    os._exit(status)
