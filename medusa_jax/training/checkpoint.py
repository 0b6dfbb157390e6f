"""Training state on disk (Orbax): trained variables, optimizer, data position, meta.

The frozen backbone is never saved. A checkpoint is copied to the host, written by threads
while training continues, and renamed when complete. A kill during a save, or a full disk,
thus leaves the previous checkpoint valid.

Each contains checksums of its files (`checksums.json`), since Orbax does not notice flipped bits of an array.
A damaged checkpoint is set aside, and the run resumes from the previous one.
"""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from medusa_jax import hosts
from medusa_jax.console import announced, inform
from medusa_jax.errors import UNWRITABLE, UserError, first_line
from medusa_jax.sharding import PyTree, shapes_with
from medusa_jax.whole_files import checksum, write_json

SUMS = "checksums.json"


class Checkpoints:
    """The `checkpoints/` directory of a run; a context manager that waits for the last save."""

    def __init__(self, workdir: str, keep: int):
        import orbax.checkpoint as ocp

        class Manager(ocp.CheckpointManager):
            def reached_preemption(self, step: int) -> bool:
                """Never: the loop asks JAX, whose step count a late call from Orbax would reset."""
                return False

        self.args = ocp.args
        self.directory = os.path.join(os.path.abspath(workdir), "checkpoints")
        os.makedirs(self.directory, exist_ok=True)
        finish = ocp.AsyncOptions(post_finalization_callback=self._write_checksums)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=True, async_options=finish
        )
        self.manager = Manager(self.directory, options=options)
        # Step of the save that may be in flight.
        self.saving: int | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if hosts.lost(error):
            return  # a save cannot be completed without the lost process
        try:
            self.wait()
        except UserError as failed:
            if error is None:
                raise
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
        self.saving = step
        items = self.args.Composite(
            trainable=self.args.StandardSave(params),
            opt=self.args.StandardSave(opt),
            data=self.args.JsonSave(data),
            meta=self.args.JsonSave(meta),
        )
        try:
            self.manager.save(step, args=items, force=True)
        except Exception as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
          UserError: it could not be written; names the checkpoint that remains.
        """
        try:
            self.manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error

    def check(self) -> None:
        """Raise the error of a failed save, without waiting for one in flight."""
        if not self.manager.is_saving_in_progress():
            self.wait()

    def _failed(self, error: Exception) -> UserError:
        self.manager.reload()  # Orbax counts checkpoints that it planned to delete as deleted
        latest = self.manager.latest_step()
        return UserError(
            f"checkpoint of step {self.saving} in {self.directory} failed ({reason_of(error)}); "
            + ("none is complete" if latest is None else f"step {latest} remains")
        )

    def _write_checksums(self) -> None:
        """Add checksums to the save in flight, complete but not yet renamed."""
        for path in Path(self.directory).glob(f"{self.saving}.orbax-checkpoint-tmp*"):
            # Files inside the items; Orbax changes the others later.
            files = [p for p in sorted(path.glob("*/**/*")) if p.is_file()]
            names = [str(p.relative_to(path)) for p in files]
            write_json(path / SUMS, checksums(path, names))

    def restore(self, params: PyTree, opt: PyTree) -> tuple[PyTree, PyTree, dict, dict]:
        """Read the newest undamaged checkpoint, placed like these trees.

        Damaged ones are reported and set aside as `<step>.damaged`.

        Returns: params, opt, data, meta.

        Raises:
          UserError: it does not fit the configuration, or all are damaged.
        """
        self.wait()
        steps = sorted(self.manager.all_steps(), reverse=True)
        damaged: dict[int, str] = {}
        for step in steps:
            problem = ""
            if hosts.first():
                with announced(f"checking the checkpoint of step {step}"):
                    problem = damage(Path(self.directory, str(step)))
            if not hosts.broadcast_from_first(bool(problem)):
                break
            damaged[step] = problem
        else:
            reasons = "; ".join(f"step {n}: {reason}" for n, reason in damaged.items())
            raise UserError(
                f"no checkpoint in {self.directory} can be read ({reasons}); restore them from a copy, "
                "or use another --workdir"
            )
        checkpoint = self._read(step, params, opt)
        self._set_aside(damaged, step)
        return checkpoint

    def _read(
        self, step: int, params: PyTree, opt: PyTree
    ) -> tuple[PyTree, PyTree, dict, dict]:
        def spec(tree: PyTree) -> PyTree:
            return shapes_with(tree, jax.tree.map(lambda x: x.sharding, tree))

        items = self.args.Composite(
            trainable=self.args.StandardRestore(spec(params)),
            opt=self.args.StandardRestore(spec(opt)),
            data=self.args.JsonRestore(),
            meta=self.args.JsonRestore(),
        )
        try:
            out = self.manager.restore(step, args=items)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError):
                raise
            if hosts.lost(error):
                raise
            raise UserError(
                f"{self.directory} (step {step}) does not fit this configuration "
                f"({first_line(error)}); use the configuration it was made with, or another --workdir"
            ) from error
        return out.trainable, out.opt, out.data, out.meta

    def _set_aside(self, damaged: dict[int, str], restored: int) -> None:
        """Rename damaged checkpoints, so that their steps can be saved again."""
        if not damaged:
            return
        for step, reason in damaged.items() if hosts.first() else ():
            path = os.path.join(self.directory, str(step))
            shutil.rmtree(f"{path}.damaged", ignore_errors=True)
            os.replace(path, f"{path}.damaged")
            inform(
                f"checkpoint of step {step} is damaged ({reason}), kept as {path}.damaged; resuming "
                f"from step {restored}"
            )
        hosts.broadcast_from_first(True)  # wait until process 0 has renamed them
        self.manager.reload()


def reason_of(error: Exception) -> str:
    """The disk's problem, which Orbax and TensorStore wrap in long messages, or the first line."""
    problems = map(os.strerror, UNWRITABLE)
    return next((x for x in problems if x in str(error)), first_line(error))


def checksums(path: Path, names: list[str]) -> dict[str, int]:
    """Checksums of files in a directory, several at a time."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: checksum(path / name), names)))


def damage(path: Path) -> str:
    """The problem with the files of a checkpoint; "" if none, or if it has no checksums."""
    sums = path / SUMS
    try:
        stored = json.loads(sums.read_text()) if sums.exists() else {}
        current = checksums(path, list(stored))
    except (OSError, ValueError, TypeError) as error:
        return f"{SUMS}: {first_line(error)}"
    names = [name for name in stored if current[name] != stored[name]]
    return f"{names[0]} has another checksum" if names else ""
