"""Optimizers per group of variables, and schedules."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from medusa_jax.config import OptimConfig
from medusa_jax.sharding import PyTree, path_string

# Muon orthogonalises the updates of hidden matrices; embeddings, LM heads and vectors use AdamW.
MUON_KERNELS = re.compile(r"layers_\d+/(.*/)?kernel$")
# Share of a "wsd" run (warm-up, stable, decay) spent in the linear decay at its end.
WSD_DECAY = 0.2


def muon_matrices(params: PyTree) -> PyTree:
    """A tree that marks the matrices that Muon updates (kernels [in, out]); None elsewhere."""
    spec = optax.contrib.MuonDimensionNumbers(reduction_axis=0, output_axis=1)

    def mark(
        key_path: KeyPath, leaf: jax.Array
    ) -> optax.contrib.MuonDimensionNumbers | None:
        hidden = leaf.ndim == 2 and MUON_KERNELS.search(path_string(key_path))
        return spec if hidden else None

    return jax.tree_util.tree_map_with_path(mark, params)


def matrices(params: PyTree) -> PyTree:
    """True where weight decay applies: all leaves except vectors (norm scales, biases)."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def make_schedule(cfg: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate by number of updates made.

    "cosine": linear warm-up, then half a cosine down to `final_lr_ratio` of the peak.
    "wsd": warm-up, constant, linear decay in the last fifth. "constant": warm-up, constant.
    """
    warmup = steps // 20 if cfg.warmup_steps < 0 else cfg.warmup_steps
    warmup = min(warmup, max(steps - 1, 0))
    end = cfg.lr * cfg.final_lr_ratio
    first = cfg.lr / max(warmup, 1)
    ramp = optax.linear_schedule(first, cfg.lr, max(warmup - 1, 1))
    steps_left = max(steps - warmup, 1)
    if cfg.schedule == "cosine":
        body = optax.cosine_decay_schedule(cfg.lr, steps_left, cfg.final_lr_ratio)
    elif cfg.schedule == "wsd":
        decay = max(int(steps_left * WSD_DECAY), 1)
        body = optax.linear_schedule(
            cfg.lr, end, decay, transition_begin=steps_left - decay
        )
    else:
        body = optax.constant_schedule(cfg.lr)
    return optax.join_schedules([ramp, body], [warmup]) if warmup else body


def make_optimizer(
    cfg: OptimConfig, groups: tuple[str, ...], steps: int
) -> optax.GradientTransformation:
    """Clip by the global gradient norm, then apply each group's optimizer and rate.

    Heads that train together with another group have `heads_name` and `heads_lr_multiplier`. Trees are
    {group: parameters}.
    """
    schedule = make_schedule(cfg, steps)
    rules = {group: make_rule(cfg.name, cfg, schedule) for group in groups}
    if "heads" in groups and len(groups) > 1:
        name, factor = cfg.heads_name or cfg.name, cfg.heads_lr_multiplier
        rules["heads"] = make_rule(name, cfg, lambda n: factor * schedule(n))
    clip = optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity()
    # A state of one structure, so that a resumed run may change `clip_norm`.
    return optax.chain(clip, optax.partition(rules, {name: name for name in groups}))


def make_rule(
    name: str, cfg: OptimConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """AdamW, AdamW with 8-bit moments, or Muon (all take the same learning rate).

    Muon's updates are scaled to AdamW's usual root mean square (0.2 of the rate; Liu et al.
    2025, "Muon is scalable for LLM training"), so that one rate serves both kinds.
    """
    first = jnp.dtype(cfg.moment_dtype)
    if name == "adamw":
        return optax.adamw(
            schedule, cfg.b1, cfg.b2, cfg.eps, mu_dtype=first,
            weight_decay=cfg.weight_decay, mask=matrices,
        )  # fmt: skip
    if name == "adamw8bit":
        from medusa_jax.training.optim.adamw8bit import adamw8bit

        return adamw8bit(schedule, cfg.b1, cfg.b2, cfg.eps, cfg.weight_decay, matrices)
    muon = optax.contrib.muon(
        schedule, eps=cfg.eps, mu_dtype=first, weight_decay=cfg.weight_decay, consistent_rms=0.2,
        adam_b1=cfg.b1, adam_b2=cfg.b2, adam_weight_decay=cfg.weight_decay,
        muon_weight_dimension_numbers=muon_matrices,
    )  # fmt: skip

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        # Only weight decay reads parameters. AdamW's part has no mask: vectors become 0.
        return muon.update(grads, state, jax.tree.map(lambda x: x * (x.ndim > 1), params))

    return optax.GradientTransformation(muon.init, update)


def heads_weight(kind: str, peak: float, steps: int) -> Callable[[jax.Array], jax.Array]:
    """lambda_0 (Medusa 2.2.2) by number of steps made: the weight of the heads' loss.

    "constant", or "sine": peak * sin(pi/2 * step / steps), so that the large initial loss of
    fresh heads hardly changes the backbone.
    """

    def weight(step: jax.Array) -> jax.Array:
        if kind == "constant":
            return jnp.asarray(peak, jnp.float32)
        return peak * jnp.sin(jnp.pi / 2 * jnp.minimum(step / steps, 1.0))

    return weight
