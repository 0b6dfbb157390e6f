"""The contract of acceptance rules: a rule accepts one path of the verified tree."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from medusa_jax.decoding.copies import Nodes
from medusa_jax.decoding.sampling import Sampling
from medusa_jax.heads.drafter import Ranked
from medusa_jax.model.cache import KVCache
from medusa_jax.model.kernels import Kernels


class Accepted(NamedTuple):
    """The outcome of one verification.

    Attributes:
      path_BL: nodes of the accepted path, root first; entries after `n_B` repeat its end.
      n_B: accepted drafts, 0 to L - 1 (the root is not counted).
      bonus_B: the token after the path, chosen by the verifier.
    """

    path_BL: jax.Array
    n_B: jax.Array
    bonus_B: jax.Array


class Drafts(NamedTuple):
    """A drafted tree.

    Attributes:
      tree: the filled nodes.
      nodes_BM: token ids of all nodes, the root first.
      ranked: the guesses by depth; empty if the tree has spares.
      ids_O: token ids of these guesses; None: all tokens.
      allowed_BMW: the tokens that a constraint allows after each node (`token_sets`); None: all.
    """

    tree: Nodes
    nodes_BM: jax.Array
    ranked: tuple[Ranked, ...]
    ids_O: jax.Array | None
    allowed_BMW: jax.Array | None = None


class Verified(NamedTuple):
    """A drafted tree and the verifier's results.

    Attributes:
      drafts: the tree.
      hidden_BME, logits_BMV: the verifier's hidden states and logits at each node.
      cache: keys and values, including all nodes in slots [length, length + M).
      sampling: sampling parameters of the rows.
      length_B: position of the root.
    """

    drafts: Drafts
    hidden_BME: jax.Array
    logits_BMV: jax.Array
    cache: KVCache
    sampling: Sampling
    length_B: jax.Array

    @property
    def positions_BM(self) -> jax.Array:
        """The absolute position of each node."""
        return self.length_B[:, None] + jnp.asarray(self.drafts.tree.depth_M)[None, :]


# (sampling parameters, positions [B, K], the number of tokens or their ids [O], dtype) -> noise [B, K, O].
NoiseFn = Callable[[Sampling, jax.Array, int | jax.Array, Any], jax.Array]


@dataclass(frozen=True)
class Rule:
    """One acceptance rule; `RULES`, in `__init__.py`, has them by name.

    Attributes:
      name: its value of `--acceptance`.
      lossless: whether the text, or at least its distribution, equals plain decoding's.
      guarantee: the guarantee as printed in outputs.
      accept: the rule itself.
      noise: gives g of the positions after the root; drafts are ranked by logits / T + g. None: nothing is drawn.
        Otherwise a prompt's first token is drawn, too, with the verifier's noise.
      dense: whether siblings must have the ranks 0, 1, ... without gaps.
      by_drafts: whether the text depends on the drafts or on the heads' scores, even if its
        distribution does not; otherwise drafts only affect speed.
    """

    name: str
    lossless: bool
    guarantee: str
    accept: Callable[[Kernels, Verified], Accepted]
    noise: NoiseFn | None = None
    dense: bool = False
    by_drafts: bool = False


def walk(matched_BM: jax.Array, tree: Nodes, tie_break_BM: jax.Array | None = None):
    """Find the longest path whose nodes all match: (path_BL, n_B, deepest node_B).

    A node is accepted if it and all its ancestors match; the root always matches. Of equally deep
    accepted nodes, the one with the largest `tie_break_BM` is chosen, or the first without it.

    Example: the tree of `Tree`'s docstring, matched = [.., yes, no, no, yes]: node 4 (path
    [0, 2]) is the deepest accepted one, path [0, 1, 4], n = 2.
    """
    is_root_M = jnp.asarray(tree.depth_M) == 0
    failed_BM = ~matched_BM & ~is_root_M[None, :]
    # accepted[v] = no failed node among v's ancestors and itself
    accepted_BM = ~jnp.any(jnp.asarray(tree.mask_MM)[None] & failed_BM[:, None, :], axis=-1)
    depth_BM = jnp.where(accepted_BM, jnp.asarray(tree.depth_M)[None, :], -1)
    if tie_break_BM is None:
        node_B = jnp.argmax(depth_BM, axis=-1)
    else:
        longest_BM = depth_BM == jnp.max(depth_BM, axis=-1, keepdims=True)
        node_B = jnp.argmax(jnp.where(longest_BM, tie_break_BM, -jnp.inf), axis=-1)
    path_BL = jnp.take(jnp.asarray(tree.ancestors_ML), node_B, axis=0)
    return path_BL, jnp.take(jnp.asarray(tree.depth_M), node_B), node_B
