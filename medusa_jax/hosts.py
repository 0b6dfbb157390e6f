"""Several processes as one program: how they find each other, agree when to stop, and end."""

import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # its service has no public name
from jax.experimental import multihost_utils

from medusa_jax.console import inform, overtime
from medusa_jax.errors import UserError

# Command line flags, as `jax.distributed.initialize` calls them.
FLAGS = ("coordinator_address", "num_processes", "process_id")
# On virtual machines with TPUs the environment says nothing, JAX asks the machine.
TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
# Exit status where another process is lost or never came: try again (EX_TEMPFAIL of sysexits.h).
LOST = 75
# What passes the devices at a time on its way to the hosts.
PIECE_BYTES = 64 * 2**20
# Every process gives a sign of life so often, in seconds, and is lost where so many in a row are missing:
# after a minute, before JAX's own service ends the others (after 100 seconds, with a stack trace).
PULSE, MISSING = 10.0, 6
# Where the signs of life lie in the service, and the last one of a process that ends well.
SIGNS, ENDED = "medusa_jax/alive/", "ended"
# Seconds that a step may take: a process that lives and does not go on holds up all others.
STALLED = 1800.0


def join(given: Mapping[str, str]) -> None:
    """Join the other processes of this run, if there are any; before anything touches a device.

    JAX reads addresses and numbers from SLURM, Open MPI, Cloud TPU and GKE; elsewhere all three
    `FLAGS` are given. A process that no launcher started beside others runs alone.

    Raises:
      UserError: some of the flags are missing or no numbers. Where nobody answers the process ends
        with `LOST`.
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
    except RuntimeError as error:
        # The others may only be late, on machines that are still to come.
        _leave(LOST, f"the processes of this run did not meet: {_first(error)}")
    except ValueError as error:
        if perhaps:
            return  # a TPU that belongs to no pod
        raise UserError(
            f"this process does not know the others: {_first(error)}"
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


@contextmanager
def one_prints() -> Iterator[None]:
    """What the block prints as its result is printed by process 0 alone."""
    if first():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


@contextmanager
def claimed(directory: str | Path) -> Iterator[None]:
    """Keep other programs from writing to `directory` during the block; process 0 holds the lock.

    The system drops the lock when its process ends, even by SIGKILL; the empty file may stay.

    Raises:
      UserError: another program holds it, or the directory cannot be written to.
    """
    if not first():
        yield
        return
    import filelock  # here, not for every command

    lock = filelock.FileLock(Path(directory) / ".lock")
    try:
        os.makedirs(directory, exist_ok=True)
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise UserError(
            f"{directory} is in use by another process: wait for its end or name another directory"
        ) from None
    except NotImplementedError:
        inform(f"note: {directory} has no file locks: start no second program on it")
    except OSError as error:
        raise UserError(f"{directory} cannot be written to: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def of_first(x: Any) -> np.ndarray:
    """What process 0 says, in all of them: numbers of one shape, for which all must ask.

    What each reads from a disk or a clock by itself may differ, and with it the programs that they run.
    """
    return np.asarray(multihost_utils.broadcast_one_to_all(np.asarray(x)))


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

    Without another one a collective operation fails, or waits for ever. A normal end would wait
    for all others, which may be waiting for this one.
    """
    try:
        with _signs_of_life():
            yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        if lost(error):
            _leave(LOST, _without_another(_first(error)))
        elif isinstance(error, UserError):
            _leave(2, str(error))
        else:
            traceback.print_exc()
            _leave(1, "this process failed, and with it the run")


def lost(error: BaseException | None) -> bool:
    """Whether devices failed together, as they do where another process is lost."""
    # jaxlib gives a failed result as either type, its status first: "UNKNOWN: Gloo ...".
    runtime = isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and re.match(r"[A-Z_]+: ", str(error)) is not None
    )
    return runtime and jax.process_count() > 1 and "RESOURCE_EXHAUSTED" not in str(error)


def wait(x: Any) -> None:
    """Until the devices have computed `x`; ends this process where others hold them up for long."""
    if jax.process_count() == 1:
        jax.block_until_ready(x)
        return
    with _within(STALLED, f"no step was finished in {STALLED / 60:.0f} minutes"):
        jax.block_until_ready(x)


@contextmanager
def _signs_of_life() -> Iterator[None]:
    """Processes hear of each other from here to the end of the block, on a thread."""
    if distributed.global_state.num_processes == 1:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_listen, args=(ended,), name="signs", daemon=True)
    thread.start()
    yield  # an error goes on to `together`, which does not wait for anybody
    ended.set()
    thread.join()


def _listen(ended: threading.Event) -> None:
    """Gives signs of this process's life and counts those that others miss."""
    service = distributed.global_state
    client: Any = service.client
    last: dict[str, str] = {}
    missing = dict.fromkeys((f"{SIGNS}{i}" for i in range(service.num_processes)), 0)
    beat = 0
    while True:
        over = ended.is_set()
        sign = ENDED if over else str(beat := beat + 1)
        try:
            with _within(
                PULSE * MISSING, "process 0, which all report to, does not answer"
            ):
                mine = f"{SIGNS}{service.process_id}"
                client.key_value_set(mine, sign, allow_overwrite=True)
                heard = dict(client.key_value_dir_get(SIGNS))
        except jax.errors.JaxRuntimeError as error:
            _leave(LOST, _without_another(_first(error)))
            return
        if over:
            return
        for name in missing:
            same = heard.get(name) == last.get(name) != ENDED
            # Signs, not seconds: where this process itself was stopped, none were missed.
            missing[name] = missing[name] + 1 if same else 0
            if missing[name] >= MISSING:
                process = name.removeprefix(SIGNS)
                silence = f"process {process} gave no sign of life for {PULSE * MISSING:.0f} seconds"
                _leave(LOST, _without_another(silence))
                return
        last = heard
        ended.wait(PULSE)


def _within(seconds: float, reason: str) -> AbstractContextManager[None]:
    """Ends this process where the block takes longer."""
    return overtime(seconds, lambda: _leave(LOST, _without_another(reason)))


def _without_another(reason: str) -> str:
    return (
        f"another process of this run is lost ({reason}); start all processes again with the "
        "same command: they go on from what was saved last"
    )


def _leave(status: int, words: str) -> None:
    """Says one sentence and is gone, whatever threads and other processes wait for."""
    inform(f"error: {words}")
    sys.stdout.flush()
    os._exit(status)


def _first(error: Exception) -> str:
    """The first line of what an error says, cut to a sentence's length."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _flags() -> str:
    return ", ".join(f"--{name}" for name in FLAGS)
