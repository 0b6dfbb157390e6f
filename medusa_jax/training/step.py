"""One training step: what is trained, the loss of a batch, the update, its placement.

"backbone" trains every parameter of a Llama as a language model, "medusa1" trains draft heads
on a frozen one (Medusa 2.2.1), "medusa2" and "native" train both (2.2.2). What is trained and
what is frozen are two separate trees from the start: only the first is differentiated, optimised
and saved.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from medusa_jax.config import Config
from medusa_jax.console import announced
from medusa_jax.heads import Base, Drafter, make_drafter
from medusa_jax.model import lora
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.model.remat import after
from medusa_jax.sharding import batch_sharding, param_shardings, replicated
from medusa_jax.training import estimate, losses
from medusa_jax.training.partition import heads_weight, keep_if, trained_groups

Tree = Any


class TrainState(NamedTuple):
    """What a step changes. `step` counts batches, `updates` those that were not skipped."""

    step: jax.Array
    updates: jax.Array
    params: Tree
    opt: Tree


@dataclasses.dataclass(frozen=True)
class Stage:
    """What is trained: shapes, initial values and the loss of one microbatch.

    Variables are dicts of groups ("backbone", "lora", "heads"), as `partition.TABLE` names them.

    Attributes:
      aheads: how many tokens ahead each of the losses looks; the backbone's own loss looks 1.
      loss: (params, frozen, microbatch, counts, dropout key, lambda_0) -> (loss, Sums).
      init: (key, groups that are there already) -> the trained groups that are not.
      lambda_0: step -> weight of the heads' loss, where it is one of two terms.
      hidden: (frozen, batch) -> hidden states of a frozen backbone, which the loss takes from
        the batch if they are in it.
      ranks: (params, frozen, batch) -> rank of each head's label [B, T, K], if there are heads.
    """

    aheads: tuple[int, ...]
    loss: Callable[..., tuple[jax.Array, losses.Sums]]
    init: Callable[[jax.Array, Tree], Tree]
    lambda_0: Callable[[jax.Array], jax.Array]
    hidden: Callable[[Tree, Tree], jax.Array] | None = None
    ranks: Callable[[Tree, Tree, Tree], jax.Array] | None = None


def make_stage(cfg: Config, steps: int, mesh: Mesh | None = None) -> Stage:
    """The stage that `cfg.train.stage` names, on the backbone shape `cfg.model.arch`.

    With a mesh the rows of a microbatch are split over its devices all through the step.
    """
    train, arch = cfg.train, cfg.model.arch
    trained = trained_groups(cfg)
    # Nothing is recomputed in a backward pass that does not reach the backbone.
    remat = train.remat and set(trained) != {"heads"}
    llama = Llama(arch, jnp.dtype(train.dtype), remat=remat, mesh=mesh)
    lambda_0 = heads_weight(train.lambda_0_schedule, train.lambda_0, steps)
    chunk, decay = train.loss_chunk, train.lambda_decay
    targets = losses.HeadTargets(
        train.label_weight, train.teacher_weight, train.hidden_noise
    )

    def with_adapters(params: Tree) -> Tree:
        """Adapters scaled once, before the losses take gradients chunk by chunk."""
        if "lora" not in params:
            return params
        return params | {"lora": lora.scaled(params["lora"], cfg.lora)}

    def base_of(groups: Tree, key: jax.Array | None = None) -> Base:
        adapters = groups.get("lora")
        if adapters is not None and key is not None and cfg.lora.dropout:
            adapters = lora.with_dropout(adapters, key)
        return Base(llama, groups["backbone"], adapters)

    def original(frozen: Tree) -> Base | None:
        """The teacher: the backbone as it was, adapters and dropout off."""
        if train.backbone_loss != "kl":
            return None
        return Base(llama, frozen["teacher" if "teacher" in frozen else "backbone"])

    def backbone(
        params: Tree,
        frozen: Tree,
        batch: Tree,
        counts_K: jax.Array,
        key: Any,
        lambda_0: Any,
    ) -> Any:
        return losses.backbone_loss(
            with_adapters(params), lambda p: base_of(frozen | p, key), batch, counts_K, chunk,
            original(frozen),
        )  # fmt: skip

    if "heads" not in trained:
        return Stage((1,), backbone, partial(fresh_groups, cfg, None), lambda_0)
    drafter = make_drafter(cfg.heads, arch)
    init = partial(fresh_groups, cfg, drafter)
    aheads = tuple(k + 2 for k in range(cfg.heads.n_heads))

    def heads(
        params: Tree,
        frozen: Tree,
        batch: Tree,
        counts_K: jax.Array,
        key: Any,
        lambda_0: Any,
    ) -> Any:
        base = base_of(frozen)
        return losses.head_loss(
            params["heads"],
            drafter,
            base,
            batch,
            counts_K,
            chunk,
            decay,
            key,
            targets,
        )

    def joint(
        params: Tree,
        frozen: Tree,
        batch: Tree,
        counts_K: jax.Array,
        key: Any,
        lambda_0: Any,
    ) -> Any:
        adapter_key, head_key = (None, None) if key is None else jax.random.split(key)

        def split(p: Tree) -> tuple[Tree, Base]:
            return p["heads"], base_of(frozen | p, adapter_key)

        return losses.joint_loss(
            with_adapters(params), split, drafter, batch, counts_K, lambda_0, chunk, decay,
            original(frozen), head_key, targets,
        )  # fmt: skip

    def ranks(params: Tree, frozen: Tree, batch: Tree) -> jax.Array:
        base = base_of(frozen | with_adapters(params))
        hidden_BTD = losses.hidden_states(base, batch)
        return estimate.head_ranks(params["heads"], drafter, base, hidden_BTD, batch, chunk)

    if set(trained) == {"heads"}:

        def hidden(frozen: Tree, batch: Tree) -> jax.Array:
            return base_of(frozen).forward(*losses.rows(batch))

        return Stage(aheads, heads, init, lambda_0, hidden, ranks)
    return Stage((1, *aheads), joint, init, lambda_0, None, ranks)


def fresh_groups(cfg: Config, drafter: Drafter | None, key: jax.Array, given: Tree) -> Tree:
    """Initial values of what is trained and not given: "backbone", "lora", "heads"."""
    arch, out = cfg.model.arch, {}
    if "backbone" not in given:
        out["backbone"] = init_params(arch, key)
    backbone = (given | out)["backbone"]
    if "lora" in trained_groups(cfg) and "lora" not in given:
        adapter_key = jax.random.fold_in(key, 2)
        out["lora"] = lora.init_lora(arch, adapter_key, cfg.lora.rank)
    if drafter is not None and "heads" not in given:
        base = Base(Llama(arch), backbone)
        out["heads"] = drafter.init(jax.random.fold_in(key, 1), base)
    return out


def make_step(
    stage: Stage,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    seed: int,
) -> Callable[[TrainState, Tree, Tree], tuple[TrainState, Tree]]:
    """step(state, frozen, batch) -> (state, metrics); batch arrays are [A, B / A, T].

    The gradients of the A microbatches add up: each divides by the counts of the whole batch.
    A loss or gradient that is not finite leaves parameters and optimizer as they were.
    """

    def step(state: TrainState, frozen: Tree, batch: Tree) -> tuple[TrainState, Tree]:
        counts_K = losses.pair_counts(batch, stage.aheads)
        lambda_0 = stage.lambda_0(state.step)
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)
        gradient = jax.value_and_grad(stage.loss, has_aux=True)
        A = batch["tokens"].shape[0]

        def one(micro: Tree, i: jax.Array) -> Tree:
            key = jax.random.fold_in(step_key, i)
            return gradient(state.params, frozen, micro, counts_K, key, lambda_0)

        if A == 1:
            (loss, sums), grads = one(
                jax.tree.map(lambda x: x[0], batch), jnp.zeros((), jnp.int32)
            )
        else:

            def body(total: Tree, xs: Tree) -> tuple[Tree, None]:
                return jax.tree.map(jnp.add, total, one(*xs)), None

            first = (jax.tree.map(lambda x: x[0], batch), jnp.zeros((), jnp.int32))
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, *first)
            )
            ((loss, sums), grads), _ = jax.lax.scan(body, zeros, (batch, jnp.arange(A)))
        norm = optax.tree.norm(grads)
        ok = jnp.isfinite(loss) & jnp.isfinite(norm)
        # Or the moments of all parameters are unpacked before the first gradient is there.
        before = after(state.opt, norm)
        updates, opt = optimizer.update(grads, before, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = summary(stage, sums, counts_K) | {
            "objective": loss,
            "gradient_norm": norm,
            "lr": jnp.asarray(schedule(state.updates), jnp.float32),
            "skipped": ~ok,
        }
        params, opt = keep_if(ok, (params, opt), (state.params, state.opt))
        return TrainState(state.step + 1, state.updates + ok, params, opt), metrics

    return step


def summary(stage: Stage, sums: losses.Sums, counts_K: jax.Array) -> dict[str, jax.Array]:
    """Means over the counted pairs: loss in nats, top-1 and top-5 accuracy, each [K].

    Where heads train together with the backbone, its own figures are `lm_loss`, `lm_top1` and
    `lm_top5`, and `lm_objective` is its term L_LM as it is minimised (the KL, if that is
    asked for).
    """
    n = jnp.maximum(counts_K, 1.0)
    means = {"loss": sums.nll / n, "top1": sums.top1 / n, "top5": sums.top5 / n}
    if stage.aheads[0] != 1 or len(stage.aheads) == 1:
        return means
    own = {f"lm_{name}": x[0] for name, x in means.items()}
    first = jax.tree.map(lambda x: x[0], sums)
    own["lm_objective"] = losses.next_token_mean(first, counts_K[0])
    return {name: x[1:] for name, x in means.items()} | own


def state_shardings(mesh: Mesh, abstract: TrainState) -> TrainState:
    """Moments lie where their parameters do (their paths end alike), scalars everywhere."""
    return param_shardings(mesh, abstract)


def microbatches(mesh: Mesh, batch: dict[str, np.ndarray], accumulation: int) -> Tree:
    """Host rows of this process [B, T] -> global arrays [A, B / A, T], rows over the mesh."""
    sharding = batch_sharding(mesh)

    def place(x: np.ndarray) -> jax.Array:
        split = x.reshape(accumulation, -1, *x.shape[1:])
        return jax.make_array_from_process_local_data(sharding, split)

    return jax.tree.map(place, batch)


def abstract_batch(cfg: Config, mesh: Mesh) -> Tree:
    """Shapes and placement of a batch."""
    t = cfg.train
    shape = (t.accumulation, t.batch_size // t.accumulation, cfg.data.seq_len)
    sharding = batch_sharding(mesh)
    kinds = {
        "tokens": "int32",
        "positions": "int32",
        "segment_ids": "int32",
        "counted": "bool",
    }
    batch = {
        name: jax.ShapeDtypeStruct(shape, np.dtype(kind), sharding=sharding)
        for name, kind in kinds.items()
    }
    if cfg.data.cache_features:
        kind = jnp.dtype(cfg.data.cache_features)
        shape_D = (*shape, cfg.model.arch.d_model)
        batch["hidden"] = jax.ShapeDtypeStruct(shape_D, kind, sharding=sharding)
    return batch


def init_state(
    stage: Stage, optimizer: optax.GradientTransformation, mesh: Mesh, frozen: Tree, seed: int,
    start: Tree = None,
) -> TrainState:  # fmt: skip
    """Step 0; groups that `start` does not hold are initialised where they belong."""
    start = start or {}
    key, given = jax.random.key(seed), frozen | start
    shardings = param_shardings(mesh, jax.eval_shape(stage.init, key, given))
    params = start | jax.jit(stage.init, out_shardings=shardings)(key, given)
    shapes = jax.eval_shape(optimizer.init, params)
    opt = jax.jit(optimizer.init, out_shardings=param_shardings(mesh, shapes))(params)
    zero, updates = (jax.device_put(np.int32(0), replicated(mesh)) for _ in range(2))
    return TrainState(zero, updates, params, opt)


def compile_step(
    step: Callable, state: TrainState, frozen: Tree, batch: Tree, mesh: Mesh
) -> Any:
    """The step as an executable; its arguments may be shapes. The state is donated."""
    out = (state_shardings(mesh, state), None)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    with (
        announced("compiling the training step (this can take minutes)"),
        jax.set_mesh(mesh),  # attention kernels are split over it by hand
    ):
        return jitted.lower(state, frozen, batch).compile()
