"""What is trained, and by which rule: optimizer, schedule, Muon's matrices, weight decay."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from medusa_jax.config import OptimConfig
from medusa_jax.errors import UserError
from medusa_jax.sharding import path_string

# Muon orthogonalises the update of hidden matrices; embeddings and LM heads are look-up
# tables over the vocabulary and stay with AdamW, as do vectors.
MUON_KERNELS = re.compile(r"layers_\d+/(.*/)?kernel$")
# Share of a "wsd" run (warm-up, stable, decay) spent in the linear decay at its end.
WSD_DECAY = 0.2


def muon_matrices(params: Any) -> Any:
    """A tree that marks the matrices Muon updates (kernels are [in, out]); None elsewhere."""
    spec = optax.contrib.MuonDimensionNumbers(reduction_axis=0, output_axis=1)

    def mark(key_path: Any, leaf: Any) -> Any:
        hidden = leaf.ndim == 2 and MUON_KERNELS.search(path_string(key_path))
        return spec if hidden else None

    return jax.tree_util.tree_map_with_path(mark, params)


def matrices(params: Any) -> Any:
    """True where weight decay applies: everything but vectors (norm scales, biases)."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def make_schedule(cfg: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate by number of updates made.

    "cosine": linear warm-up, then half a cosine down to `final_lr_ratio` of the peak.
    "wsd": warm-up, constant, the last fifth linear. "constant": warm-up, constant.
    """
    warmup = min(cfg.warmup_steps, max(steps - 1, 0))
    end = cfg.lr * cfg.final_lr_ratio
    first = cfg.lr / max(warmup, 1)
    ramp = optax.linear_schedule(first, cfg.lr, max(warmup - 1, 1))
    rest = max(steps - warmup, 1)
    if cfg.schedule == "cosine":
        body = optax.cosine_decay_schedule(cfg.lr, rest, cfg.final_lr_ratio)
    elif cfg.schedule == "wsd":
        decay = max(int(rest * WSD_DECAY), 1)
        body = optax.linear_schedule(cfg.lr, end, decay, transition_begin=rest - decay)
    elif cfg.schedule == "constant":
        body = optax.constant_schedule(cfg.lr)
    else:
        raise UserError(f"optim.schedule is cosine, wsd or constant, not {cfg.schedule!r}")
    return optax.join_schedules([ramp, body], [warmup]) if warmup else body


def make_optimizer(
    cfg: OptimConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW or Muon (both take the same learning rate).

    Muon's updates are scaled to AdamW's usual root mean square (0.2 of the rate; Liu et al.
    2025, "Muon is scalable for LLM training"), so that one rate serves both kinds.
    """
    if cfg.name == "adamw":
        rule = optax.adamw(
            schedule, cfg.b1, cfg.b2, cfg.eps, weight_decay=cfg.weight_decay, mask=matrices
        )
    elif cfg.name == "muon":
        rule = optax.contrib.muon(
            schedule,
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            adam_b1=cfg.b1,
            adam_b2=cfg.b2,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=muon_matrices,
        )
    else:
        raise UserError(f"optim.name is adamw or muon, not {cfg.name!r}")
    if not cfg.clip_norm:
        return rule
    return optax.chain(optax.clip_by_global_norm(cfg.clip_norm), rule)


def keep_if(ok: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the scalar `ok` holds, else `old`, for whole trees."""
    return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)
