"""What a run does, resolved once from its configuration, the model's shape and the devices."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.config import (
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from medusa_jax.errors import UserError, between
from medusa_jax.files.hf import model_shape
from medusa_jax.files.hub import is_here, resolve
from medusa_jax.heads.drafter import Drafter
from medusa_jax.heads.registry import make_drafter
from medusa_jax.sharding import make_mesh, row_shards
from medusa_jax.training import checks
from medusa_jax.training.data import sources
from medusa_jax.training.partition import Trains, trained_groups
from medusa_jax.whole_files import Json


@dataclass(frozen=True)
class RunPlan:
    """A training run.

    Attributes:
      model, heads, data, optim, lora, train: sections of the configuration, with the model's shape and the mesh's
        number of microbatches.
      workdir: where checkpoints and results go.
      record: the whole configuration, as config.json and recipes hold it.
      arch: the backbone's shape, added layers included.
      groups: the trained groups of variables, and how.
      drafter: the heads that are trained; None without heads.
      mesh: the devices.
      microbatch: rows of one microbatch over the whole mesh.
    """

    model: ModelConfig
    heads: HeadsConfig
    data: DataConfig
    optim: OptimConfig
    lora: LoraConfig
    train: TrainConfig
    workdir: str
    record: Json
    arch: LlamaConfig
    groups: dict[str, Trains]
    drafter: Drafter | None
    mesh: Mesh
    microbatch: int

    @classmethod
    def of(cls, cfg: Config, arch: LlamaConfig, mesh: Mesh) -> "RunPlan":
        """The plan for a backbone of this shape on these devices.

        Raises:
          UserError: sizes that do not fit together.
        """
        model = dataclasses.replace(cfg.model, arch=arch)
        accumulation = microbatches_on(mesh, cfg.train.batch_size, cfg.train.accumulation)
        train = dataclasses.replace(cfg.train, accumulation=accumulation)
        cfg = dataclasses.replace(cfg, model=model, train=train)
        checks.check(cfg)
        shards = row_shards(mesh)
        if train.batch_size % (accumulation * shards):
            raise UserError(
                f"train.batch_size {train.batch_size} is not a multiple of accumulation x data x fsdp "
                f"= {accumulation} x {shards}"
            )
        positions = "data.seq_len (positions of the model)"
        between(positions, cfg.data.seq_len, 3, arch.max_position)
        groups = trained_groups(train.stage, cfg.lora.rank)
        return cls(
            model=model,
            heads=cfg.heads,
            data=cfg.data,
            optim=cfg.optim,
            lora=cfg.lora,
            train=train,
            workdir=cfg.workdir,
            record=dataclasses.asdict(cfg),
            arch=arch,
            groups=groups,
            drafter=make_drafter(cfg.heads, arch) if "heads" in groups else None,
            mesh=mesh,
            microbatch=train.batch_size // accumulation,
        )

    def steps(self, rows: int) -> int:
        """Number of updates, for an epoch of that many rows."""
        epochs = self.train.epochs * rows // self.train.batch_size
        return self.train.steps or max(epochs, 1)


def plan_run(
    cfg: Config, devices: Sequence[jax.Device] | None = None, dry: bool = False
) -> RunPlan:
    """The plan of a run on this machine.

    Args:
      devices: as for `make_mesh`.
      dry: download nothing: a model that is not on this machine has the shape `model.arch`. The data may be missing.

    Raises:
      UserError: a problem with the configuration, the names of the data, the model's files or the machine.
    """
    checks.check(cfg)
    if not dry:
        sources.check_all_exist(cfg.data)
    arch = cfg.model.arch
    if cfg.model.path:
        arch = backbone_shape(cfg.model, dry)
    return RunPlan.of(cfg, arch, make_mesh(cfg.mesh, devices))


def backbone_shape(model: ModelConfig, dry: bool = False) -> LlamaConfig:
    """The shape of `model.path` with its added layers."""
    arch = model.arch
    if not dry or is_here(model.path):
        arch = model_shape(resolve(model.path, ["config.json"] if dry else None))
    return dataclasses.replace(arch, n_layers=arch.n_layers + model.add_layers)


def microbatches_on(mesh: Mesh, batch_size: int, accumulation: int) -> int:
    """The microbatches that a mesh needs for `train.accumulation`, which is given for one device.

    The least number with no more rows per device than on one device. The update is unchanged; fewer
    microbatches gather the weights and sum the gradients less often.
    """
    devices = row_shards(mesh)
    for n in range(1, accumulation + 1):
        rows, remainder = divmod(batch_size, n * devices)
        if not remainder and rows * accumulation <= batch_size:
            return n
    return accumulation
