"""The loss and initial values of each training stage (Medusa 2.2.1 and 2.2.2).

"backbone" trains a Llama as a language model, "medusa1" trains draft heads on a frozen one, "medusa2" and
"native" train both. Trained and frozen variables are two separate trees: only the first is differentiated,
optimised and saved.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from medusa_jax.arch import LlamaConfig
from medusa_jax.config import LoraConfig, TrainConfig
from medusa_jax.errors import UserError
from medusa_jax.heads import vocabulary
from medusa_jax.heads.drafter import Drafter
from medusa_jax.heads.optional import SupportsAnchors, has_confidence, loss_view
from medusa_jax.kernels.choose import choose_kernels
from medusa_jax.model import lora as adapters
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.sharding import PyTree
from medusa_jax.training.losses import induction, objectives
from medusa_jax.training.losses.pairs import StepInputs, Sums, text_of
from medusa_jax.training.optim.optimizer import heads_weight


@dataclasses.dataclass(frozen=True, eq=False)  # `jax.jit` hashes it, by identity
class Stage:
    """A training stage: initial values and the loss of one microbatch.

    Variables are dicts of groups ("backbone", "lora", "heads"), as in `partition.TABLE`.

    Attributes:
      llama: the backbone without its variables.
      trains_backbone: whether L_LM is a term of the loss.
      lambda_0: step -> weight of the heads' loss, if it is one of two terms.
      drafter: the heads; None without heads.
      view: the heads that the loss covers (`optional.loss_view`); None without heads.
    """

    train: TrainConfig
    llama: Llama
    lora: LoraConfig
    trains_backbone: bool
    lambda_0: Callable[[jax.Array], jax.Array]
    drafter: Drafter | None
    view: Drafter | None

    @property
    def offsets(self) -> tuple[int, ...]:
        """For each loss, how many tokens ahead it predicts; 1 for the backbone's."""
        heads = range(self.view.n_heads) if self.view else ()
        return (1,) * self.trains_backbone + tuple(k + 2 for k in heads)

    @property
    def anchors(self) -> int:
        """Number of positions of a row that a step trains, 0: all."""
        return self.train.anchors if self.drafter else 0

    @property
    def width(self) -> int:
        """E, the width of the hidden states that the loss reads, tapped streams included."""
        return self.llama.config.d_model * (1 + len(self.llama.taps))

    def backbone(self, groups: PyTree, dropout_key: jax.Array | None = None) -> Backbone:
        """The backbone with its adapters, if any."""
        adapter = groups.get("lora")
        if adapter is not None and dropout_key is not None and self.lora.dropout:
            adapter = adapters.with_dropout(adapter, dropout_key)
        return Backbone(self.llama, groups["backbone"], adapter)

    def drafting(self, groups: PyTree, dropout_key: jax.Array | None = None) -> Backbone:
        """The backbone for heads: with a draft vocabulary its LM head scores only those tokens."""
        backbone = self.backbone(groups, dropout_key)
        if vocabulary.GROUP not in groups:
            return backbone
        if "lm_head" in groups[vocabulary.GROUP]:
            return vocabulary.for_drafting(backbone, groups)
        return vocabulary.narrowed(backbone, groups[vocabulary.GROUP]["ids"])

    def with_adapters(self, params: PyTree) -> PyTree:
        """Scale the adapters once, instead of in every chunk of the loss."""
        if "lora" not in params:
            return params
        return params | {"lora": adapters.scale(params["lora"], self.lora)}

    def original(self, frozen: PyTree) -> Backbone | None:
        """The teacher, if any: the backbone before training, without adapters and dropout."""
        if self.train.backbone_loss != "kl":
            return None
        teacher = frozen["teacher" if "teacher" in frozen else "backbone"]
        return Backbone(self.llama.clone(taps=()), teacher)

    def init(self, key: jax.Array, groups: PyTree) -> PyTree:
        """Initial values of the trained groups that are not given: "backbone", "lora", "heads"."""
        out, arch, rank = {}, self.llama.config, self.lora.rank
        if "backbone" not in groups:
            out["backbone"] = init_params(arch, key)
        backbone = (groups | out)["backbone"]
        if rank and "lora" not in groups:
            out["lora"] = adapters.init_lora(arch, jax.random.fold_in(key, 2), rank)
        if self.drafter is not None and "heads" not in groups:
            backbone = Backbone(Llama(arch), backbone)
            if self.drafter.heads.draft_vocab:
                backbone = vocabulary.narrowed(backbone, groups[vocabulary.GROUP]["ids"])
            out["heads"] = self.drafter.init(jax.random.fold_in(key, 1), backbone)
        return out

    def loss(
        self, params: PyTree, frozen: PyTree, inputs: StepInputs
    ) -> tuple[jax.Array, Sums]:
        """L_LM, sum_k lambda_k L_k (Medusa equation 1), or both (equation 2), and the sums of both, L_LM's first.

        L = L_LM + lambda_0 sum_k lambda_k L_k: one pass of the backbone serves both terms, and the heads' gradient
        flows into it. A frozen backbone runs once, outside the gradient.

        Args:
          params, frozen: the trained groups of variables, and the others.
        """
        adapter_key = head_key = inputs.dropout_key
        if self.view is not None and self.trains_backbone and adapter_key is not None:
            adapter_key, head_key = jax.random.split(adapter_key)
        groups = frozen | self.with_adapters(params)
        backbone = self.backbone(groups, adapter_key)
        if not self.trains_backbone:
            assert self.view is not None
            hidden_BTE = objectives.hidden_states(backbone, inputs.batch)
            return objectives.heads_loss(
                self.view, params["heads"], self.drafting(groups, adapter_key),
                lax.stop_gradient(hidden_BTE), self.train, inputs, params.keys(),
            )  # fmt: skip

        hidden_BTE = backbone.forward(*text_of(inputs.batch))
        hidden_BTD = hidden_BTE[..., : self.llama.config.d_model]
        lm_loss, lm_sums = objectives.next_token_loss(
            backbone, hidden_BTD, inputs, self.train.loss_chunk, params.keys(),
            self.original(frozen),
        )  # fmt: skip
        if self.view is None:
            return lm_loss, lm_sums
        head_inputs = inputs._replace(dropout_key=head_key, counts_K=inputs.counts_K[1:])
        loss, head_sums = objectives.heads_loss(
            self.view, params["heads"], self.drafting(groups, adapter_key),
            hidden_BTE, self.train, head_inputs, params.keys(),
        )  # fmt: skip
        sums = jax.tree.map(lambda s, t: jnp.concatenate([s, t]), lm_sums, head_sums)
        return lm_loss + inputs.lambda_0 * loss, sums

    def metrics(self, sums: Sums, counts_K: jax.Array) -> dict[str, jax.Array]:
        """Means over the counted pairs: loss in nats, top-1 and top-5 accuracy, each [K].

        With a draft vocabulary `inside` is the share of pairs whose token is in it. The loss averages these
        pairs; the others count as misses.

        If heads train together with the backbone, its metrics are `lm_loss`, `lm_top1` and `lm_top5`, and
        `lm_objective` is the minimised term L_LM (cross-entropy or KL).
        """
        n = jnp.maximum(counts_K, 1.0)
        scored = jnp.maximum(sums.scored, 1.0)
        means = {"loss": sums.nll / scored, "top1": sums.top1 / n, "top5": sums.top5 / n}
        is_narrow = self.drafter is not None and self.drafter.heads.draft_vocab
        coverage = {"inside": sums.scored / n} if is_narrow else {}
        if self.view is None or not self.trains_backbone:
            return means | coverage
        lm = {f"lm_{name}": x[0] for name, x in means.items()}
        lm["lm_objective"] = objectives.next_token_mean(
            sums.loss[0], sums.entropy[0], counts_K[0]
        )
        return {name: x[1:] for name, x in (means | coverage).items()} | lm


def make_stage(
    train: TrainConfig, arch: LlamaConfig, groups: tuple[str, ...], drafter: Drafter | None,
    lora: LoraConfig, steps: int, mesh: Mesh | None = None,
) -> Stage:  # fmt: skip
    """The stage `train.stage` of `steps` updates for a backbone of shape `arch`.

    With a mesh the rows of a microbatch stay split over its devices throughout the step.

    Args:
      groups: `partition.trained_groups`.
      drafter: the heads, if "heads" are trained.
    """
    trains_backbone = groups != ("heads",)
    # Without gradients through the backbone there is nothing to recompute.
    remat = train.remat and trains_backbone
    llama = Llama(
        arch,
        jnp.dtype(train.dtype),
        remat,
        mesh=mesh,
        kernels=choose_kernels(mesh),
        taps=drafter.taps if drafter else (),
    )
    lambda_0 = heads_weight(train.lambda_0_schedule, train.lambda_0, steps)
    view = None
    if drafter is not None:
        check_terms(train, drafter)
        view = loss_view(drafter, train.levels)
    return Stage(train, llama, lora, trains_backbone, lambda_0, drafter, view)


def check_terms(train: TrainConfig, drafter: Drafter) -> None:
    """Refuse terms of the loss that these heads do not have."""
    if train.induction_weight:
        induction.check(drafter)
    if train.anchors and not isinstance(drafter, SupportsAnchors):
        raise UserError(f"train.anchors is for dflash and dspark, not {drafter.name}")
    if bool(train.confidence_weight) != has_confidence(drafter):
        raise UserError("train.confidence_weight and heads.confidence need each other")
