"""A chain of the tree copied from the text: prompt lookup in addition to draft heads.

If the last tokens of the text occurred earlier, the tokens that followed them then often
follow again, as in names, code and lists. Heads predict such repeats only if trained to; a
lookup costs only integer comparisons. The chain shares the root with the drafts of the
heads and is verified in the same pass, so decoding stays lossless: the longest path that
agrees is kept. Two nodes may hold the same token.

The latest of the longest matches of up to `NGRAM` tokens is used, since nearby text is more similar. With 8
instead of 4 tokens SmolLM2's answers take 0.5 to 0.8% more tokens per step.

A match of one token is rarely right: in SmolLM2's answers 23% of the tokens after it are,
52% after a match of two. A tree with *spares* verifies its chain only if `REPEATS` tokens
match in half of the rows. Otherwise it verifies the spares, as many further guesses of the
heads, under another mask. A step with the chain does not draft the spares, and often needs
no heads at all. SAM decoding (Hu et al. 2024) likewise drafts from the text or from heads,
by the length of the match.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.heads.drafter import Proposal
from medusa_jax.tree.tree import Tree

# Longest n-gram to look up, and shortest match for which a tree with spares uses its chain.
NGRAM, REPEATS = 8, 2


class TreeArrays(NamedTuple):
    """The part of a tree that verification and acceptance read, as arrays that a step chooses."""

    parent_M: jax.Array
    depth_M: jax.Array
    mask_MM: jax.Array
    ancestors_ML: jax.Array
    copied_M: jax.Array

    @classmethod
    def of(cls, tree: Tree, path_length: int) -> "TreeArrays":
        """Constants of a tree, its paths padded to `path_length` with their last node."""
        padding = path_length - tree.path_length
        ancestors_ML = np.pad(tree.ancestors_ML, ((0, 0), (0, padding)), mode="edge")
        arrays = tree.parent_M, tree.depth_M, tree.mask_MM, ancestors_ML, tree.copied_M
        return cls(*map(jnp.asarray, arrays))

    @property
    def n_nodes(self) -> int:
        return self.parent_M.shape[0]

    @property
    def path_length(self) -> int:
        return self.ancestors_ML.shape[1]


# What verification and acceptance read: constants, or arrays that a step chooses.
Nodes = Tree | TreeArrays


def continuations(
    text_BS: jax.Array, last_B: jax.Array, n: int, *, latest: bool
) -> tuple[jax.Array, jax.Array]:
    """The continuation of the longest match for the end of each text.

    Args:
      text_BS: tokens; `last` is the index of the last valid one.
      n: tokens of the continuation.
      latest: prefer the latest of equally long matches, not the earliest.

    Returns: the tokens [B, n], and the length of the match [B], 0 for none.
    """
    S = text_BS.shape[1]
    begin_1S, last_B1 = jnp.arange(S)[None, :], last_B[:, None]
    padded_BS = jnp.pad(text_BS, ((0, 0), (NGRAM, 0)), constant_values=-1)
    # length[s]: number of tokens before s that equal those at the end of the text.
    length_BS = jnp.zeros(text_BS.shape, jnp.int32)
    matching_BS = begin_1S <= last_B1
    for back in range(NGRAM):
        at = NGRAM - back
        token_BS = padded_BS[:, at - 1 : at - 1 + S]
        tail_B1 = jnp.take_along_axis(padded_BS, last_B1 + at, axis=1)
        matching_BS &= (token_BS == tail_B1) & (token_BS >= 0)
        length_BS += matching_BS
    place_1S = begin_1S if latest else S - begin_1S
    score_BS = jnp.where(length_BS > 0, length_BS * (S + 1) + place_1S, 0)
    best_B = jnp.max(score_BS, axis=1)
    place_B = best_B % (S + 1)
    begin_B = place_B if latest else S - place_B
    period_B = jnp.maximum(last_B + 1 - begin_B, 1)
    offset_1L = jnp.arange(n)[None, :]
    at_BL = begin_B[:, None] + offset_1L % period_B[:, None]
    tokens_BL = jnp.take_along_axis(text_BS, jnp.minimum(at_BL, S - 1), axis=1)
    return tokens_BL, best_B // (S + 1)


def copied_tokens(
    text_BS: jax.Array, root_at_B: jax.Array, n: int, predicted_BP: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The n tokens after the best earlier match for the end of each text [B, n], and its length [B].

    Example:  a b c a b  gives c a b c ... and 2.

    Args:
      root_at_B: index of the last valid token, which is repeated if nothing matches.
      predicted_BP: as in `DecodeState`; preferred unless a match in the text is longer.
    """
    copies_BL, length_B = continuations(text_BS, root_at_B, n, latest=True)
    root_B1 = jnp.take_along_axis(text_BS, root_at_B[:, None], axis=1)
    copies_BL = jnp.where((length_B > 0)[:, None], copies_BL, root_B1)
    if predicted_BP is None:
        return copies_BL, length_B

    def with_predicted() -> tuple[jax.Array, jax.Array]:
        at_BN = root_at_B[:, None] + jnp.arange(1 - NGRAM, 1)[None, :]
        tail_BN = jnp.take_along_axis(text_BS, jnp.maximum(at_BN, 0), axis=1)
        searched_BS = jnp.concatenate([predicted_BP, tail_BN], axis=1)
        last_B = jnp.full_like(root_at_B, searched_BS.shape[1] - 1)
        others_BL, others_B = continuations(searched_BS, last_B, n, latest=False)
        others_BL = jnp.where(others_BL < 0, root_B1, others_BL)
        better_B = (others_B > 0) & (others_B >= length_B)
        tokens_BL = jnp.where(better_B[:, None], others_BL, copies_BL)
        return tokens_BL, jnp.where(better_B, others_B, length_B)

    any_predicted = jnp.any(predicted_BP >= 0)
    return lax.cond(any_predicted, with_predicted, lambda: (copies_BL, length_B))


def fill_with_copies(
    tree: Tree,
    propose: Callable[[Tree], Proposal],
    text_BS: jax.Array,
    root_at_B: jax.Array,
    running_B: jax.Array,
    predicted_BP: jax.Array | None = None,
) -> tuple[Proposal, Nodes]:
    """Fill a tree with drafted and copied tokens; also returns the tree that they fill.

    Example: of the nodes 0 to 4, 1 and 3 are copied. Drafted r x y for 0, 2, 4 and copied a b give
    r a x b y, the entries 0 3 1 4 2 of r x y a b.

    Args:
      propose: fills a tree without copied nodes. If the tree has spares, its ranked guesses are dropped:
        they belong to one of two trees, and rules that read them use no spares.
      running_B: the rows that decide whether spares are used.
      predicted_BP: as in `DecodeState`.
    """
    n_copied = len(tree.copied_C)
    copied_BC, length_B = copied_tokens(text_BS, root_at_B, n_copied, predicted_BP)
    drafted = Tree(tree.choices).drafted
    place = drafted.node_of | {
        tree.choices[c - 1]: drafted.n_nodes + i for i, c in enumerate(tree.copied_C)
    }
    place_M = np.array([place[path] for path in ((), *tree.choices)])

    def copying() -> Proposal:
        nodes_BM, ranked = propose(drafted)
        return Proposal(jnp.concatenate([nodes_BM, copied_BC], axis=1)[:, place_M], ranked)

    if not tree.spares:
        return copying(), tree
    repeats = 2 * jnp.sum((length_B >= REPEATS) & running_B) >= jnp.sum(running_B)
    nodes_BM = lax.cond(
        repeats, lambda: copying().nodes_BM, lambda: propose(tree.drafted).nodes_BM
    )
    arrays = (TreeArrays.of(t, tree.path_length) for t in (tree, tree.drafted))
    return Proposal(nodes_BM), jax.tree.map(partial(jnp.where, repeats), *arrays)
