"""Training state on disk (Orbax): what is trained, optimizer, data position, meta.

The frozen backbone is never saved. A checkpoint is copied to the host, then written on threads
beside the last one while training goes on, and renamed when complete, so being killed during a
save, or a full disk, leaves the earlier one valid.

Each holds the checksums of its files (`checksums.json`), since Orbax reads flipped bits of an
array without noticing them. A checkpoint that is damaged all the same is set aside, and the run goes
on from the one before it.
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
from typing import Any

import jax

from medusa_jax import hosts
from medusa_jax.console import announced, inform
from medusa_jax.errors import UserError
from medusa_jax.whole_files import checksum, write_json

SUMS = "checksums.json"


class Checkpoints:
    """The `checkpoints/` directory of one run; a context, at whose end no save is in flight."""

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
        meet = ocp.multihost.get_barrier_sync_fn()

        def meet_unless_failed(*, key: str, timeout_ms: int) -> None:
            # Orbax would have a process whose save failed wait here for all others, for whom it
            # does not come: they are behind another barrier.
            if sys.exception() is None:
                meet(key=key, timeout_ms=timeout_ms)

        class Manager(ocp.CheckpointManager):
            def reached_preemption(self, step: int) -> bool:
                """Never: the loop asks JAX, and Orbax's thread, which is steps behind, would set
                the step back from which JAX counts."""
                return False

        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(
                barrier_sync_fn=meet_unless_failed,
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
            return  # with another process its part of the save is lost
        try:
            self.wait()
        except UserError as failed:
            if error is None or (isinstance(error, UserError) and error.__cause__):
                raise  # a full disk stops several files: this one says where the run goes on
            inform(f"error: {failed}")  # beside what ends the run
        finally:
            self.manager.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, which a save in flight is waited for to be."""
        self.wait()
        return self.manager.latest_step()

    def save(self, step: int, params: Any, opt: Any, data: dict, meta: dict) -> None:
        """Copies everything to the host and begins to write it under `step`.

        Does nothing when that step is there already. The arrays may be donated afterwards.

        Raises:
          UserError: it, or the save before, could not be written; names the checkpoint that remains.
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
        """Until no save is in flight.

        Raises:
          UserError: it could not be written; names the checkpoint that remains.
        """
        try:
            self.manager.wait_until_finished()
        except Exception as error:
            raise self.failed(error) from error

    def check(self) -> None:
        """Raises what `wait` does as soon as it is known, without waiting."""
        if not self.manager.is_saving_in_progress():
            self.wait()

    def failed(self, error: Exception) -> UserError:
        """What to say of a save that failed; the rest of it is no longer waited for."""
        self.manager.reload()  # Orbax counts what it had been about to delete as deleted
        remains = self.manager.latest_step()
        return UserError(
            f"checkpoint of step {self.saving} in {self.directory} failed ({first_line(error)}); "
            + ("none is complete" if remains is None else f"step {remains} remains")
        )

    def _write_checksums(self) -> None:
        """Add the checksums of the save in flight, which is complete but has no final name yet."""
        for path in Path(self.directory).glob(f"{self.saving}.orbax-checkpoint-tmp*"):
            write_json(path / SUMS, checksums(path, files_of(path)))

    def restore(self, params: Any, opt: Any) -> tuple[Any, Any, dict, dict]:
        """Read the newest undamaged checkpoint, placed like the given trees.

        Damaged ones are reported and set aside as `<step>.damaged`.

        Returns: params, opt, data, meta.

        Raises:
          UserError: it does not fit the run's configuration, or none can be read.
        """
        self.wait()
        damaged: dict[int, str] = {}
        for step in sorted(self.manager.all_steps(), reverse=True):
            path = Path(self.directory, str(step))
            problem = ""
            if hosts.first():
                with announced(f"checking the checkpoint of step {step}"):
                    problem = damage(path)
            if hosts.of_first(bool(problem)):
                damaged[step] = problem
                continue
            try:
                found = self._read(step, params, opt)
            except Exception as error:
                memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(
                    error
                )
                if memory or hosts.lost(error):
                    raise
                reason = first_line(error)
                if not (path / SUMS).exists() and jax.process_count() == 1:
                    damaged[step] = reason  # of an earlier version, perhaps damaged
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

    def _read(self, step: int, params: Any, opt: Any) -> tuple[Any, Any, dict, dict]:
        args = self.ocp.args

        def spec(tree: Any) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
            )

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
                    f"going on from step {good}"
                )
        hosts.of_first(True)  # they are renamed
        self.manager.reload()


def keep_quiet() -> None:
    """Print none of what Orbax and TensorStore print, on their threads, besides the error they raise."""
    for name in ("absl", "asyncio"):  # the same error with stack traces
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    if getattr(sys.unraisablehook, "of_checkpoints", False):
        return
    before = sys.unraisablehook

    def hook(args: Any) -> None:
        # Each write that is in flight when another one fails.
        if str(args.exc_value) != "Event loop is closed":
            before(args)

    hook.of_checkpoints = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def files_of(path: Path) -> list[str]:
    """Names of the files below the items of a checkpoint; Orbax changes those beside them later."""
    return [str(p.relative_to(path)) for p in sorted(path.glob("*/**/*")) if p.is_file()]


def checksums(path: Path, names: list[str]) -> dict[str, int]:
    """Checksums of files in a directory, several at a time."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: checksum(path / name), names)))


def damage(path: Path) -> str:
    """What is wrong with the files of a checkpoint; "" if nothing, or if it has no checksums."""
    sums = path / SUMS
    try:
        stored = json.loads(sums.read_text()) if sums.exists() else {}
        found = checksums(path, list(stored))
        wrong = [name for name in stored if found[name] != stored[name]]
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(path)} is missing"
    except (OSError, ValueError, TypeError) as error:
        return f"{SUMS}: {first_line(error)}"
    return f"{wrong[0]} has another checksum" if wrong else ""


def first_line(error: Exception) -> str:
    """What an error says, cut to a sentence's length."""
    # Orbax and TensorStore wrap what the disk says in many types, and say it late.
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS):
        if os.strerror(code) in str(error):
            return os.strerror(code)
    return (str(error).strip().splitlines() or [repr(error)])[0][:200]
