"""Weights & Biases, if `train.wandb` names a project."""

from collections.abc import Mapping
from pathlib import Path

from medusa_jax.errors import UserError
from medusa_jax.whole_files import Json, write_text


class Project:
    """A new run of a project or, in a resumed training, the run that was started."""

    def __init__(self, workdir: Path, project: str, config: Json):
        try:
            import wandb
        except ImportError:
            raise UserError(
                f"train.wandb is {project!r}, but wandb is not installed: pip install wandb"
            ) from None
        file = workdir / "wandb_id"
        known = file.read_text().strip() if file.exists() else None
        place = str(workdir)
        self.run = wandb.init(
            project=project, dir=place, config=config, id=known, resume="allow"
        )
        write_text(file, self.run.id)
        self.close = self.run.finish

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        self.run.log(scalars, step=step)

    def flush(self) -> None:
        """Its own process sends the records."""
