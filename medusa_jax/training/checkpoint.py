"""Training state on disk (Orbax): what is trained, optimizer, data position, meta.

The frozen backbone is never saved. A checkpoint is copied to the host, then written on threads
beside the last one while training goes on, and renamed when complete, so being killed during a
save, or a full disk, leaves the earlier one valid.
"""

import os
import sys
from types import TracebackType
from typing import Any

import jax

from medusa_jax import hosts
from medusa_jax.console import inform
from medusa_jax.errors import UserError


class Checkpoints:
    """The `checkpoints/` directory of one run; a context, at whose end no save is in flight."""

    def __init__(self, workdir: str, keep: int):
        import orbax.checkpoint as ocp

        self.ocp = ocp
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
            async_options=ocp.AsyncOptions(barrier_sync_fn=meet_unless_failed),
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
            if error is None:
                raise
            inform(f"error: {failed}")  # beside what ends the run
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
        # Orbax and TensorStore wrap what the disk says in many types.
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        self.manager.reload()  # Orbax counts what it had been about to delete as deleted
        remains = self.manager.latest_step()
        return UserError(
            f"checkpoint of step {self.saving} in {self.directory} failed ({reason[:200]}); "
            + ("none is complete" if remains is None else f"step {remains} remains")
        )

    def restore(self, params: Any, opt: Any) -> tuple[Any, Any, dict, dict]:
        """The newest checkpoint, placed like the given trees -> params, opt, data, meta.

        Raises:
          UserError: it does not fit the run's configuration.
        """
        args = self.ocp.args

        def spec(tree: Any) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
            )

        try:
            out = self.manager.restore(
                self.latest,
                args=args.Composite(
                    trainable=args.StandardRestore(spec(params)),
                    opt=args.StandardRestore(spec(opt)),
                    data=args.JsonRestore(),
                    meta=args.JsonRestore(),
                ),
            )
        except (ValueError, KeyError, TypeError) as error:
            reason = str(error).strip().splitlines()[0][:200] if str(error) else repr(error)
            raise UserError(
                f"{self.directory} (step {self.latest}) does not fit this configuration "
                f"({reason}); use the configuration it was made with, or another --workdir"
            ) from error
        return out.trainable, out.opt, out.data, out.meta
