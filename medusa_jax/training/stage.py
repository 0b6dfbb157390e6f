"""The loss and initial values of each training stage (Medusa 2.2.1 and 2.2.2).

"backbone" trains a Llama as a language model, "medusa1" trains draft heads on a frozen one, "medusa2" and
"native" train both. Trained and frozen variables are two separate trees: only the first is differentiated,
optimised and saved.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from medusa_jax.config import Config
from medusa_jax.errors import UserError
from medusa_jax.heads import vocabulary
from medusa_jax.heads.drafter import Backbone, Drafter
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model import lora
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.sharding import PyTree
from medusa_jax.training import estimate, losses
from medusa_jax.training.losses import HeadObjective, HeadTargets, StepInputs, Sums
from medusa_jax.training.losses.induction import Attends
from medusa_jax.training.optim.optimizer import heads_weight
from medusa_jax.training.partition import heads_taps, trained_groups

# (trained, frozen, inputs of the step) -> (loss, sums for the log).
LossFn = Callable[[PyTree, PyTree, StepInputs], tuple[jax.Array, Sums]]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A training stage: initial values and the loss of one microbatch.

    Variables are dicts of groups ("backbone", "lora", "heads"), as in `partition.TABLE`.

    Attributes:
      offsets: number of tokens that each loss looks ahead; 1 for the backbone's.
      loss: the minimised function.
      init: (key, existing groups) -> the trained groups that do not exist yet.
      lambda_0: step -> weight of the heads' loss, if it is one of two terms.
      hidden: (frozen, batch) -> hidden states of a frozen backbone; the loss reads them from the batch if
        they are cached.
      ranks: (params, frozen, batch) -> rank of each head's label [B, T, K]; None without heads.
      draft_vocab: number of tokens that the heads score, 0: all.
    """

    offsets: tuple[int, ...]
    loss: LossFn
    init: Callable[[jax.Array, PyTree], PyTree]
    lambda_0: Callable[[jax.Array], jax.Array]
    hidden: Callable[[PyTree, PyTree], jax.Array] | None = None
    ranks: Callable[[PyTree, PyTree, PyTree], jax.Array] | None = None
    draft_vocab: int = 0


def make_stage(cfg: Config, steps: int, mesh: Mesh | None = None) -> Stage:
    """The stage `cfg.train.stage` for a backbone of shape `cfg.model.arch`.

    With a mesh the rows of a microbatch stay split over its devices throughout the step.
    """
    trained = set(trained_groups(cfg))
    grouped = GroupedBackbone(cfg, mesh)
    lambda_0 = heads_weight(cfg.train.lambda_0_schedule, cfg.train.lambda_0, steps)
    if "heads" not in trained:
        loss, init = backbone_stage(grouped), partial(fresh_groups, cfg, None)
        return Stage((1,), loss, init, lambda_0)
    drafter = make_drafter(cfg.heads, cfg.model.arch)
    init = partial(fresh_groups, cfg, drafter)
    objective = head_objective(cfg, drafter)
    offsets = tuple(k + 2 for k in range(objective.drafter.n_heads))
    ranks = partial(label_ranks, grouped, drafter)
    if trained == {"heads"}:
        loss, hidden = heads_stage(grouped, objective), grouped.hidden_states
        return Stage(offsets, loss, init, lambda_0, hidden, ranks, cfg.heads.draft_vocab)
    loss, offsets = joint_stage(grouped, objective), (1, *offsets)
    return Stage(offsets, loss, init, lambda_0, None, ranks, cfg.heads.draft_vocab)


class GroupedBackbone:
    """Builds the backbone in training from its groups of variables."""

    def __init__(self, cfg: Config, mesh: Mesh | None):
        self.cfg = cfg
        # Without gradients through the backbone there is nothing to recompute.
        remat = cfg.train.remat and set(trained_groups(cfg)) != {"heads"}
        dtype = jnp.dtype(cfg.train.dtype)
        self.llama = Llama(
            cfg.model.arch, dtype, remat=remat, mesh=mesh, taps=heads_taps(cfg)
        )

    def backbone(self, groups: PyTree, dropout_key: jax.Array | None = None) -> Backbone:
        """The backbone with its adapters, if any."""
        adapters = groups.get("lora")
        if adapters is not None and dropout_key is not None and self.cfg.lora.dropout:
            adapters = lora.with_dropout(adapters, dropout_key)
        return Backbone(self.llama, groups["backbone"], adapters)

    def drafting(self, groups: PyTree, dropout_key: jax.Array | None = None) -> Backbone:
        """The backbone for heads: its LM head scores only the draft vocabulary, if there is one."""
        backbone = self.backbone(groups, dropout_key)
        if vocabulary.GROUP not in groups:
            return backbone
        return vocabulary.narrowed(backbone, groups[vocabulary.GROUP]["ids"])

    def with_adapters(self, params: PyTree) -> PyTree:
        """Scale the adapters once, instead of in every chunk of the loss."""
        if "lora" not in params:
            return params
        return params | {"lora": lora.scale(params["lora"], self.cfg.lora)}

    def original(self, frozen: PyTree) -> Backbone | None:
        """The teacher: the backbone before training, without adapters and dropout."""
        if self.cfg.train.backbone_loss != "kl":
            return None
        teacher = frozen["teacher" if "teacher" in frozen else "backbone"]
        return Backbone(self.llama.clone(taps=()), teacher)

    def hidden_states(self, frozen: PyTree, batch: PyTree) -> jax.Array:
        """[B, T, E] of a frozen backbone."""
        return self.backbone(frozen).forward(*losses.rows(batch))


def head_objective(cfg: Config, drafter: Drafter) -> HeadObjective:
    """The configured loss of draft heads."""
    t = cfg.train
    if t.induction_weight and not isinstance(drafter, Attends):
        raise UserError(
            f"train.induction_weight is for drafters with attention over the text, eagle and eagle3, not "
            f"{drafter.name}"
        )
    targets = HeadTargets(
        t.label_weight,
        t.teacher_weight,
        t.hidden_noise,
        t.feature_weight,
        t.induction_weight,
    )
    return HeadObjective(drafter.loss_view(t.levels), t.loss_chunk, t.lambda_decay, targets)


def backbone_stage(grouped: GroupedBackbone) -> LossFn:
    """Language modelling: the backbone, or its adapters."""

    def loss(params: PyTree, frozen: PyTree, inputs: StepInputs) -> tuple[jax.Array, Sums]:
        def backbone_of(p: PyTree) -> Backbone:
            return grouped.backbone(frozen | p, inputs.dropout_key)

        chunk, original = grouped.cfg.train.loss_chunk, grouped.original(frozen)
        params = grouped.with_adapters(params)
        return losses.backbone_loss(params, backbone_of, inputs, chunk, original)

    return loss


def heads_stage(grouped: GroupedBackbone, objective: HeadObjective) -> LossFn:
    """Medusa-1: heads on a frozen backbone."""

    def loss(params: PyTree, frozen: PyTree, inputs: StepInputs) -> tuple[jax.Array, Sums]:
        return losses.head_loss(
            params["heads"], grouped.drafting(frozen), objective, inputs
        )

    return loss


def joint_stage(grouped: GroupedBackbone, objective: HeadObjective) -> LossFn:
    """Medusa-2: the backbone, or its adapters, together with the heads."""

    def loss(params: PyTree, frozen: PyTree, inputs: StepInputs) -> tuple[jax.Array, Sums]:
        key = inputs.dropout_key
        adapter_key, head_key = (None, None) if key is None else jax.random.split(key)

        def backbone_of(p: PyTree) -> Backbone:
            return grouped.backbone(frozen | p, adapter_key)

        def split(p: PyTree) -> tuple[PyTree, Backbone]:
            return p["heads"], grouped.drafting(frozen | p, adapter_key)

        params = grouped.with_adapters(params)
        inputs, original = inputs._replace(dropout_key=head_key), grouped.original(frozen)
        return losses.joint_loss(params, backbone_of, split, objective, inputs, original)

    return loss


def label_ranks(
    grouped: GroupedBackbone,
    drafter: Drafter,
    params: PyTree,
    frozen: PyTree,
    batch: PyTree,
) -> jax.Array:
    """Rank of each head's label [B, T, K], -1 where a pair does not count."""
    backbone = grouped.drafting(frozen | grouped.with_adapters(params))
    hidden_BTE = losses.hidden_states(backbone, batch)
    chunk = grouped.cfg.train.loss_chunk
    return estimate.head_ranks(params["heads"], drafter, backbone, hidden_BTE, batch, chunk)


def fresh_groups(
    cfg: Config, drafter: Drafter | None, key: jax.Array, given: PyTree
) -> PyTree:
    """Initial values of what is trained and not given: "backbone", "lora", "heads"."""
    arch, out = cfg.model.arch, {}
    if "backbone" not in given:
        out["backbone"] = init_params(arch, key)
    backbone = (given | out)["backbone"]
    if "lora" in trained_groups(cfg) and "lora" not in given:
        adapter_key = jax.random.fold_in(key, 2)
        out["lora"] = lora.init_lora(arch, adapter_key, cfg.lora.rank)
    if drafter is not None and "heads" not in given:
        backbone = Backbone(Llama(arch), backbone)
        if cfg.heads.draft_vocab:
            backbone = vocabulary.narrowed(backbone, given[vocabulary.GROUP]["ids"])
        out["heads"] = drafter.init(jax.random.fold_in(key, 1), backbone)
    return out
