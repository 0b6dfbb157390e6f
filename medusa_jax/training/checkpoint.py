"""Training state on disk (Orbax): what is trained, optimizer, data position, meta.

The frozen backbone is never saved. A checkpoint is written beside the last one and renamed
when complete, so being killed during a save, or a full disk, leaves the earlier one valid.
"""

import os
from typing import Any

import jax

from medusa_jax.errors import UserError


class Checkpoints:
    """The `checkpoints/` directory of one run."""

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
        # Synchronous: the step donates its state, which must not be read while it changes.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self.manager = ocp.CheckpointManager(self.directory, options=options)

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self.manager.latest_step()

    def save(self, step: int, params: Any, opt: Any, data: dict, meta: dict) -> None:
        """Write everything under `step`; does nothing when that step is there already.

        Raises:
          UserError: it could not be written; names the checkpoint that remains.
        """
        if step == self.latest:
            return
        args = self.ocp.args
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
        except (
            Exception
        ) as error:  # Orbax and TensorStore wrap what the disk says in many types
            reason = (
                str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            )
            remains = (
                "none is complete" if self.latest is None else f"step {self.latest} remains"
            )
            raise UserError(
                f"checkpoint of step {step} in {self.directory} failed ({reason[:200]}); {remains}"
            ) from error

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

    def close(self) -> None:
        self.manager.close()
