"""Tokens per decoding step, estimated on held-out text while the heads train (Medusa 2.3.3).

At every position whose next K + 1 tokens are counted, the ranks of the true tokens under
all heads form one tuple. Heads tend to be right at the same positions, so a product of
their accuracies would be too low. Both estimates assume that steps start at every position
equally often (`evaluate/tree_fit.py` measures the real distribution):

    accepted_length_chain   1 + sum over d of the share of positions where the first guesses of
                            heads 1 ... d are all right: a chain of K drafts
    accepted_length_tree    the same over the nodes of the best 64-node tree, found on the first
                            half of the rows

Both are counted on the second half.

The model's output in decoding is easier to predict than most held-out text. Use the
estimates to compare runs, not to predict speed.
"""

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.heads.drafter import Drafter, TextRows
from medusa_jax.heads.ranks import label_ranks
from medusa_jax.model.backbone import Backbone
from medusa_jax.sharding import PyTree
from medusa_jax.training.losses.pairs import Batch, pair_mask, text_of
from medusa_jax.tree.growth import chain_length, expected_tokens, joint_growth
from medusa_jax.tree.tree import Tree

# Rows of held-out text; enough for two digits.
ROWS = 64
TREE_NODES = 64


def head_ranks(
    params: PyTree, drafter: Drafter, backbone: Backbone, hidden_BTE: jax.Array, batch: Batch,
    chunk: int,
) -> jax.Array:  # fmt: skip
    """Rank of the true token under each head, [B, T, K] int32; -1 where a pair does not count.

    Logits exist for `chunk` positions of one head at a time.
    """
    features_KBTD = drafter.features(
        params, backbone, TextRows(hidden_BTE, *text_of(batch))
    )
    ranks_BTK = label_ranks(
        drafter, params, backbone, features_KBTD, batch["tokens"], chunk
    )
    counted = (batch["counted"], batch["segment_ids"])
    counted_BT = pair_mask(*counted, drafter.n_heads + 1)
    return jnp.where(counted_BT[..., None], ranks_BTK, -1)


def accepted_lengths(ranks: np.ndarray) -> dict[str, float]:
    """Both estimates from ranks [..., K]; empty without counted positions.

    Example, K = 2, four positions: of (0, 0) (0, 3) (1, 0) (0, 0) the last two give a chain of
    1 + 1/2 + 1/2 = 2.
    """
    tuples_PK = ranks.reshape(-1, ranks.shape[-1])
    tuples_PK = tuples_PK[tuples_PK[:, 0] >= 0]
    if len(tuples_PK) < 2:
        return {}
    # Rows are in order, so at most one text is in both halves.
    first, second = np.array_split(tuples_PK, 2)
    tree = Tree.from_choices(joint_growth(first, TREE_NODES - 1))
    return {
        "accepted_length_chain": chain_length(second),
        "accepted_length_tree": float(expected_tokens(second, tree)),
    }
