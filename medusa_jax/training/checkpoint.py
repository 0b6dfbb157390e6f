"""Training state on disk (Orbax): trained variables, optimizer, data position, meta.

The frozen backbone is never saved. A checkpoint is copied to the host, written by threads while training
continues, and renamed when complete. So a kill during a save, or a full disk, leaves the previous one valid.

Each contains checksums of its files (`checksums.json`), since Orbax does not notice flipped bits of an array.
A damaged checkpoint is set aside, and the run resumes from the previous one.
"""

import errno
import json
import logging
import os
import shutil
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import jax

from medusa_jax import hosts
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError, first_line
from medusa_jax.sharding import PyTree, shapes_with
from medusa_jax.whole_files import checksum, write_json

SUMS = "checksums.json"


class Checkpoints:
    """The `checkpoints/` directory of a run; a context manager that waits for the last save."""

    def __init__(self, workdir: str, keep: int):
        import orbax.checkpoint as ocp

        self.ocp = ocp
        keep_quiet()
        self.directory = os.path.join(os.path.abspath(workdir), "checkpoints")
        try:
            os.makedirs(self.directory, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{self.directory} cannot be created: {error.strerror}"
            ) from error
        barrier = ocp.multihost.get_barrier_sync_fn()

        def barrier_unless_failed(*, key: str, timeout_ms: int) -> None:
            # A process whose save failed would wait here for the others, which wait at another barrier.
            if sys.exception() is None:
                barrier(key=key, timeout_ms=timeout_ms)

        class Manager(ocp.CheckpointManager):
            def reached_preemption(self, step: int) -> bool:
                """Never: the loop asks JAX, and a call from Orbax's thread, some steps late, would reset
                JAX's step count."""
                return False

        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(
                barrier_sync_fn=barrier_unless_failed,
                post_finalization_callback=self._write_checksums,
            ),
        )
        self.manager = Manager(self.directory, options=options)
        # Step of the save that may be in flight.
        self.saving: int | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if hosts.lost(error):
            return  # a save cannot be completed without the lost process
        try:
            self.wait()
        except UserError as failed:
            if error is None or (isinstance(error, UserError) and error.__cause__):
                raise  # a full disk causes both; this message names the checkpoint to resume from
            inform(f"error: {failed}")  # in addition to `error`
        finally:
            self.manager.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint; waits for a save in flight."""
        self.wait()
        return self.manager.latest_step()

    def save(self, step: int, params: PyTree, opt: PyTree, data: dict, meta: dict) -> None:
        """Copy everything to the host and start to write it under `step`.

        Does nothing if that step exists. The arrays may be donated afterwards.

        Raises:
          UserError: this or the previous save could not be written; names the checkpoint that remains.
        """
        if step == self.latest:
            return
        args = self.ocp.args
        self.saving = step
        try:
            self.manager.save(
                step,
                args=args.Composite(
                    trainable=args.StandardSave(params),
                    opt=args.StandardSave(opt),
                    data=args.JsonSave(data),
                    meta=args.JsonSave(meta),
                ),
                force=True,
            )
        except Exception as error:
            raise self.failed(error) from error

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
          UserError: it could not be written; names the checkpoint that remains.
        """
        try:
            self.manager.wait_until_finished()
        except Exception as error:
            raise self.failed(error) from error

    def check(self) -> None:
        """Raise the error of a failed save, without waiting for one in flight."""
        if not self.manager.is_saving_in_progress():
            self.wait()

    def failed(self, error: Exception) -> UserError:
        """The error of a failed save, which is no longer waited for."""
        self.manager.reload()  # Orbax counts checkpoints that it planned to delete as deleted
        remains = self.manager.latest_step()
        return UserError(
            f"checkpoint of step {self.saving} in {self.directory} failed ({reason_of(error)}); "
            + ("none is complete" if remains is None else f"step {remains} remains")
        )

    def _write_checksums(self) -> None:
        """Add checksums to the save in flight, complete but not yet renamed."""
        for path in Path(self.directory).glob(f"{self.saving}.orbax-checkpoint-tmp*"):
            write_json(path / SUMS, checksums(path, files_of(path)))

    def restore(self, params: PyTree, opt: PyTree) -> tuple[PyTree, PyTree, dict, dict]:
        """Read the newest undamaged checkpoint, placed like the given trees.

        Damaged ones are reported and set aside as `<step>.damaged`.

        Returns: params, opt, data, meta.

        Raises:
          UserError: it does not fit the configuration, or none can be read.
        """
        self.wait()
        damaged: dict[int, str] = {}
        for step in sorted(self.manager.all_steps(), reverse=True):
            path = Path(self.directory, str(step))
            problem = ""
            if hosts.first():
                with announced(f"checking the checkpoint of step {step}"):
                    problem = damage(path)
            if hosts.broadcast_from_first(bool(problem)):
                damaged[step] = problem
                continue
            try:
                found = self._read(step, params, opt)
            except Exception as error:
                message = str(error)
                no_memory = (
                    isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in message
                )
                if no_memory or hosts.lost(error):
                    raise
                reason = reason_of(error)
                if not (path / SUMS).exists() and jax.process_count() == 1:
                    damaged[step] = (
                        reason  # without checksums (an earlier version): perhaps damaged
                    )
                    continue
                raise UserError(
                    f"{self.directory} (step {step}) does not fit this configuration "
                    f"({reason}); use the configuration it was made with, or another --workdir"
                ) from error
            self._set_aside(damaged, step)
            return found
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
        raise UserError(
            f"no checkpoint in {self.directory} can be read, or none fits this configuration "
            f"({reasons}); restore them from a copy, or use another --workdir"
        )

    def _read(
        self, step: int, params: PyTree, opt: PyTree
    ) -> tuple[PyTree, PyTree, dict, dict]:
        args = self.ocp.args

        def spec(tree: PyTree) -> PyTree:
            return shapes_with(tree, jax.tree.map(lambda x: x.sharding, tree))

        out = self.manager.restore(
            step,
            args=args.Composite(
                trainable=args.StandardRestore(spec(params)),
                opt=args.StandardRestore(spec(opt)),
                data=args.JsonRestore(),
                meta=args.JsonRestore(),
            ),
        )
        return out.trainable, out.opt, out.data, out.meta

    def _set_aside(self, damaged: dict[int, str], good: int) -> None:
        """Rename damaged checkpoints, so that their steps can be saved again."""
        if not damaged:
            return
        if hosts.first():
            for step, reason in damaged.items():
                path = os.path.join(self.directory, str(step))
                shutil.rmtree(f"{path}.damaged", ignore_errors=True)
                os.replace(path, f"{path}.damaged")
                inform(
                    f"checkpoint of step {step} is damaged ({reason}), kept as {path}.damaged; "
                    f"resuming from step {good}"
                )
        hosts.broadcast_from_first(True)  # wait until process 0 has renamed them
        self.manager.reload()


def keep_quiet() -> None:
    """Suppress what Orbax and TensorStore print on their threads; they also raise the error."""
    for name in ("absl", "asyncio"):  # stack traces of the same error
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    if getattr(sys.unraisablehook, "of_checkpoints", False):
        return
    previous = sys.unraisablehook

    def hook(args: "sys.UnraisableHookArgs") -> None:
        # Raised by every write in flight when another fails.
        if str(args.exc_value) != "Event loop is closed":
            previous(args)

    hook.of_checkpoints = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def files_of(path: Path) -> list[str]:
    """Names of the files inside the items of a checkpoint; Orbax changes the others later."""
    return [str(p.relative_to(path)) for p in sorted(path.glob("*/**/*")) if p.is_file()]


def checksums(path: Path, names: list[str]) -> dict[str, int]:
    """Checksums of files in a directory, several at a time."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: checksum(path / name), names)))


def damage(path: Path) -> str:
    """The problem with the files of a checkpoint; "" if none, or if it has no checksums."""
    sums = path / SUMS
    try:
        stored = json.loads(sums.read_text()) if sums.exists() else {}
        found = checksums(path, list(stored))
        wrong = [name for name in stored if found[name] != stored[name]]
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(path)} is missing"
    except (OSError, ValueError, TypeError) as error:
        return f"{SUMS}: {reason_of(error)}"
    return f"{wrong[0]} has another checksum" if wrong else ""


def reason_of(error: Exception) -> str:
    """One line about an error of a checkpoint."""
    # Orbax and TensorStore wrap errors of the disk in many types and long messages.
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS):
        if os.strerror(code) in str(error):
            return os.strerror(code)
    return first_line(error)
