"""Held-out loss, accuracies and estimated tokens per decoding step."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from medusa_jax import hosts
from medusa_jax.sharding import PyTree, local_rows
from medusa_jax.training import estimate
from medusa_jax.training.data.rows import Rows
from medusa_jax.training.losses import objectives
from medusa_jax.training.losses.pairs import StepInputs, pair_counts
from medusa_jax.training.placement import microbatches
from medusa_jax.training.stage import Stage
from medusa_jax.whole_files import Json


class Evaluator:
    """Mean loss and accuracies on the first `total` rows of held-out text, `size` at a time.

    With heads also the expected tokens per decoding step (`estimate.py`), whose logits exist for `chunk` positions
    of a head at a time.
    """

    def __init__(
        self, stage: Stage, mesh: Mesh, rows: Rows, size: int, total: int, chunk: int
    ):
        self.stage, self.mesh, self.rows = stage, mesh, rows
        self.size, self.total = size, total
        drafter = stage.drafter

        @jax.jit
        def sums(params: PyTree, frozen: PyTree, batch: PyTree) -> PyTree:
            counts = pair_counts(batch, stage.offsets)
            _, out = stage.loss(params, frozen, StepInputs(batch, counts))
            return out, counts

        def ranks(params: PyTree, frozen: PyTree, batch: PyTree) -> jax.Array:
            """Rank of each head's label [B, T, K]."""
            assert drafter is not None
            backbone = stage.drafting(frozen | stage.with_adapters(params))
            hidden_BTE = objectives.hidden_states(backbone, batch)
            return estimate.head_ranks(
                params["heads"], drafter, backbone, hidden_BTE, batch, chunk
            )

        self.sums = sums
        self.ranks = None if drafter is None else jax.jit(ranks)

    def __call__(self, params: PyTree, frozen: PyTree) -> Json:
        local = local_rows(self.mesh, self.size)
        total: PyTree = None
        ranks = []
        for first in range(0, self.total, self.size):
            numbers = first + local
            batch = self.rows.batch(numbers)
            # Rows beyond the last sample become padding.
            batch["segment_ids"][numbers >= self.total] = 0
            microbatch = jax.tree.map(lambda x: x[0], microbatches(self.mesh, batch, 1))
            rank = self.ranks if first < estimate.ROWS else None
            with jax.set_mesh(self.mesh):  # attention is split over it
                out = self.sums(params, frozen, microbatch)
                ranked = rank(params, frozen, microbatch) if rank else None
            total = out if total is None else jax.tree.map(jnp.add, total, out)
            if ranked is not None:
                ranks.append(hosts.on_host(ranked))
        record = hosts.numbers(self.stage.metrics(*total))
        return record | (estimate.accepted_lengths(np.concatenate(ranks)) if ranks else {})
