"""The plan of a training run, resolved once from its configuration, the model's shape and the devices."""

import dataclasses

from jax.sharding import Mesh

from medusa_jax.arch import LlamaConfig
from medusa_jax.config import Config, ModelConfig
from medusa_jax.errors import UserError, between
from medusa_jax.files.hf import model_shape
from medusa_jax.files.hub import is_here, resolve
from medusa_jax.heads.drafter import Drafter
from medusa_jax.heads.registry import is_baseline, make_drafter
from medusa_jax.sharding import make_mesh, row_shards
from medusa_jax.training import checks
from medusa_jax.training.data import sources
from medusa_jax.training.partition import trained_groups
from medusa_jax.whole_files import Json


class RunPlan:
    """A training run.

    Attributes:
      model, heads, data, optim, lora, train: sections of the configuration, with the model's shape and the mesh's
        number of microbatches.
      workdir: where checkpoints and results go.
      record: the whole configuration, as config.json and recipes hold it.
      arch: the backbone's shape, added layers included.
      groups: the trained groups of variables.
      drafter: the heads that are trained; None without heads.
      mesh: the devices.
      microbatch: rows of one microbatch over the whole mesh.
    """

    def __init__(self, cfg: Config, mesh: Mesh | None = None, dry: bool = False):
        """Args:
          mesh: default: the devices of this machine.
          dry: download nothing: a model that is not on this machine has the shape `model.arch`. The data may be
            missing.

        Raises:
          UserError: a problem with the configuration, the names of the data, the model's files or the machine;
            sizes that do not fit together.
        """
        checks.check(cfg)
        if not dry:
            sources.check_all_exist(cfg.data)
        self.mesh = mesh or make_mesh(cfg.mesh)
        self.arch = backbone_shape(cfg.model, dry)
        self.groups = trained_groups(cfg.train.stage, cfg.lora.rank)

        self.model = dataclasses.replace(cfg.model, arch=self.arch)
        rows, accumulation = cfg.train.batch_size, cfg.train.accumulation
        accumulation = microbatches_on(self.mesh, rows, accumulation)
        self.train = dataclasses.replace(cfg.train, accumulation=accumulation)
        self.heads, self.data, self.optim = cfg.heads, cfg.data, cfg.optim
        self.lora, self.workdir = cfg.lora, cfg.workdir
        settled = dataclasses.replace(cfg, model=self.model, train=self.train)
        checks.check(settled)
        self.record: Json = dataclasses.asdict(settled)

        shards = row_shards(self.mesh)
        if rows % (accumulation * shards):
            raise UserError(
                f"train.batch_size {rows} is not a multiple of accumulation x data x fsdp "
                f"= {accumulation} x {shards}"
            )
        self.microbatch = rows // accumulation
        positions = "data.seq_len (positions of the model)"
        between(positions, cfg.data.seq_len, 3, self.arch.max_position)
        self.drafter: Drafter | None = None
        if "heads" in self.groups:
            if is_baseline(cfg.heads.drafter):
                raise UserError(f"{cfg.heads.drafter} has no heads to train or to load")
            self.drafter = make_drafter(cfg.heads, self.arch)

    def steps(self, rows: int) -> int:
        """Number of updates, for an epoch of that many rows."""
        epochs = self.train.epochs * rows // self.train.batch_size
        return self.train.steps or max(epochs, 1)


def backbone_shape(model: ModelConfig, dry: bool) -> LlamaConfig:
    """The shape of `model.path` with its added layers, else `model.arch`."""
    arch = model.arch
    if not model.path:
        return arch
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
