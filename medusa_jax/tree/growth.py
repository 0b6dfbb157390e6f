"""Fitting the tree to the heads and to the device (Medusa 2.3.3).

One teacher-forced pass over the model's own output records, at every position, the tuple of
ranks that the true next tokens have under heads 1..K. In the paper the worth of a node is the share of
positions whose tuple begins with its path (`joint_growth`). Trees to decode with are grown by the steps
they save (`growth_by_steps`). Measured step latency then selects the size with the most tokens per second.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from medusa_jax.tree.tree import COPIED, Choice, Tree

# Ranks from this on count as a miss: no useful tree is this wide.
MISS = 64


class Recorded(NamedTuple):
    """Correct drafts at every position of a text.

    Attributes:
      ranks_PK: ranks of the true next tokens under the heads.
      copied_P: how many consecutive next tokens a chain copied from the text gets right.
    """

    ranks_PK: np.ndarray
    copied_P: np.ndarray

    @classmethod
    def of_heads(cls, ranks_PK: np.ndarray) -> "Recorded":
        """Positions with no copied tokens."""
        return cls(ranks_PK, np.zeros(len(ranks_PK), int))

    @classmethod
    def joined(cls, texts: "Sequence[Recorded]") -> "Recorded":
        """All positions of some texts."""
        return cls(*(np.concatenate(column) for column in zip(*texts, strict=True)))

    def cut(self, depth: int) -> "Recorded":
        """The same positions, limited to trees of this depth."""
        return Recorded(self.ranks_PK[:, :depth], np.minimum(self.copied_P, depth))


def head_accuracies(tuples_PK: np.ndarray, n_ranks: int = 10) -> np.ndarray:
    """a_k^(i): how often the i-th guess of head k is the right one, [K, n_ranks]."""
    return np.stack([(tuples_PK == i).mean(axis=0) for i in range(n_ranks)], axis=1)


def chain_length(tuples_PK: np.ndarray) -> float:
    """Tokens per step of a chain made of the first guess of every head."""
    return 1.0 + float(np.cumprod(tuples_PK == 0, axis=1).mean(axis=0).sum())


def product_growth(accuracy_KR: np.ndarray, n_choices: int) -> list[Choice]:
    """Nodes by the product of accuracies along their path: the paper's estimate.

    The accuracies are taken as independent; ranks with accuracy 0 are left out.
    """
    K, R = accuracy_KR.shape
    heap: list[tuple[float, int, Choice]] = []

    def push_children(path: Choice, worth: float) -> None:
        if len(path) < K:
            for rank in range(R):
                child = worth * float(accuracy_KR[len(path), rank])
                if child > 0:
                    heapq.heappush(heap, (-child, len(path) + 1, (*path, rank)))

    push_children((), 1.0)
    growth: list[Choice] = []
    while heap and len(growth) < n_choices:
        negative, _, path = heapq.heappop(heap)
        growth.append(path)
        push_children(path, -negative)
    return growth


def best_cartesian(accuracy_KR: np.ndarray, n_nodes: int) -> list[int]:
    """Widths of the Cartesian tree with the most expected tokens per step.

    Searches all widths of at most `n_nodes` nodes, root included; expected tokens are products of
    head accuracies. Example: heads whose first guess is right in 0.6 and whose second in 0.2 of all
    cases, 4 nodes: [1, 1, 1] expects 1 + 0.6 + 0.36 + 0.22 tokens, [2] expects 1 + 0.8.
    """
    K, R = accuracy_KR.shape
    within_KR = np.cumsum(accuracy_KR, axis=1)
    best: tuple[float, list[int]] = (1.0, [])

    def extend(
        widths: list[int], level: int, nodes: int, path: float, tokens: float
    ) -> None:
        nonlocal best
        best = max(best, (tokens, widths), key=lambda found: found[0])
        if len(widths) == K:
            return
        for width in range(1, R + 1):
            if nodes + level * width > n_nodes:
                break
            reached = path * float(within_KR[len(widths), width - 1])
            extend(
                [*widths, width],
                level * width,
                nodes + level * width,
                reached,
                tokens + reached,
            )

    extend([], 1, 1, 1.0, 1.0)
    return best[1]


def path_counts(tuples_PK: np.ndarray) -> Counter[Choice]:
    """Number of recorded tuples that begin with each path (paths without a miss)."""
    counts: Counter[Choice] = Counter()
    for ranks, n in Counter(map(tuple, tuples_PK.tolist())).items():
        for depth in range(1, len(ranks) + 1):
            if ranks[depth - 1] >= MISS:
                break
            counts[ranks[:depth]] += n
    return counts


def joint_growth(tuples_PK: np.ndarray, n_choices: int) -> list[Choice]:
    """Nodes by how often the true continuation runs through them, no independence assumed.

    A node is never worth more than its parent, so the n best nodes always form a tree, and no
    tree of n nodes is worth more.
    """
    counts = path_counts(tuples_PK)
    return sorted(counts, key=lambda path: (-counts[path], len(path), path))[:n_choices]


def expected_tokens(tuples_PK: np.ndarray, tree: Tree) -> float:
    """1 + the summed worth of the tree's nodes, taking step starts as uniform (2.3.3)."""
    counts = path_counts(tuples_PK)
    return 1 + sum(counts[c] for c in tree.choices) / len(tuples_PK)


def growth_by_steps(texts: Sequence[Recorded], n_choices: int) -> list[Choice]:
    """Add nodes greedily, each time the one with which decoding these texts takes fewest steps.

    Considered are the drafted node whose token is right most often at the starts of the steps so far, and
    the next copied node. A share of positions would not do: text that can be copied is passed in a few
    long steps, in which one more token saves less than in text with short ones.

    Example: six tokens can be copied, then four are each the first guess of their head. [-1] leaves
    3 + 4 of 10 steps. Then [0] leaves 3 + 2 and [-1, -1] 2 + 4, although five positions would use it.

    Args:
      texts: positions of each text, in order.
    """
    ranks_PK, copied_P = Recorded.joined(texts)
    begins = np.cumsum([0, *(len(text.ranks_PK) for text in texts)]).tolist()
    at_P = np.arange(len(ranks_PK))
    reached_P = np.zeros(len(ranks_PK), int)  # how deep drafts agree with the text,
    node_P = np.zeros(len(ranks_PK), int)  # and the node where they end
    n_copied, paths, growth = 0, [Choice()], list[Choice]()

    def starts(reached_P: np.ndarray, n_copied: int) -> np.ndarray:
        """Positions at which a step begins."""
        next_P = (at_P + np.maximum(reached_P, np.minimum(copied_P, n_copied)) + 1).tolist()
        found = []
        for at, end in itertools.pairwise(begins):
            while at < end:
                found.append(at)
                at = next_P[at]
        return np.array(found, int)

    begin_S = starts(reached_P, 0)
    while len(growth) < n_choices:
        # Nothing is gained where copied tokens reach further than a child would.
        covered_S = reached_P[begin_S] < np.minimum(copied_P[begin_S], n_copied)
        open_S = begin_S[~covered_S & (reached_P[begin_S] < ranks_PK.shape[1])]
        rank_S = ranks_PK[open_S, reached_P[open_S]]
        child_S = (node_P[open_S] * MISS + rank_S)[rank_S < MISS]
        options: list[tuple[np.ndarray, Choice, np.ndarray]] = []
        if child_S.size:
            child, times = np.unique(child_S, return_counts=True)
            parent, rank = divmod(int(child[times.argmax()]), MISS)
            path = (*paths[parent], rank)
            depth = len(path)
            agrees_P = (node_P == parent) & (reached_P == depth - 1)
            agrees_P &= ranks_PK[:, depth - 1] == rank
            deeper_P = np.where(agrees_P, depth, reached_P)
            options.append((starts(deeper_P, n_copied), path, deeper_P))
        if (copied_P > n_copied).any():
            copied = (COPIED,) * (n_copied + 1)
            options.append((starts(reached_P, n_copied + 1), copied, reached_P))
        if not options:
            break
        begin_S, path, deeper_P = min(options, key=lambda option: len(option[0]))
        if path[0] == COPIED:
            n_copied += 1
        else:
            node_P = np.where(deeper_P > reached_P, len(paths), node_P)
            reached_P = deeper_P
            paths.append(path)
        growth.append(path)
    return growth


def replay(texts: Sequence[Recorded], tree: Tree) -> tuple[int, int]:
    """Return (tokens, steps) of decoding the recorded texts with this tree.

    After a step that accepts n drafts the next one starts n + 1 positions further, as in decoding,
    so step starts are not uniform over positions.

    Args:
      texts: positions of each text, in order.
    """
    nodes, n_copied = set(tree.choices), len(tree.copied_C)
    steps = tokens = 0
    for ranks_PK, copied_P in texts:
        at = 0
        while at < len(ranks_PK):
            path: Choice = ()
            for rank in ranks_PK[at].tolist():
                if (*path, rank) not in nodes:
                    break
                path = (*path, rank)
            accepted = max(len(path), min(int(copied_P[at]), n_copied))
            gain = min(accepted + 1, len(ranks_PK) - at)
            steps, tokens, at = steps + 1, tokens + gain, at + gain
    return tokens, steps


def replayed_tokens(texts: Sequence[Recorded], tree: Tree) -> float:
    """Mean accepted length of the tree in a replay of these texts."""
    tokens, steps = replay(texts, tree)
    return tokens / max(steps, 1)


def held_out_tokens(
    texts: Sequence[Recorded],
    grow: Callable[[Sequence[Recorded]], list[Choice]],
    sizes: Sequence[int],
) -> list[float]:
    """Mean accepted length of the best tree of every size, on held-out texts.

    Two folds of whole texts: each half is replayed with the trees grown from the other half. On
    the texts it was grown from a large tree looks better than it is, since its last nodes were
    seen once.

    Args:
      texts: positions of each text, two texts at least.
      grow: best choices first.
      sizes: numbers of nodes, root included.
    """
    folds = texts[::2], texts[1::2]
    growths = [grow(fold) for fold in folds]
    found = []
    for size in sizes:
        runs = [
            replay(fold, Tree.from_choices(growth[: size - 1]))
            for fold, growth in zip(folds, reversed(growths))
        ]
        tokens, steps = (sum(column) for column in zip(*runs))
        found.append(tokens / max(steps, 1))
    return found
