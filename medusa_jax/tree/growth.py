"""Grow the tree by recorded ranks (Medusa 2.3.3).

One teacher-forced pass over the model's own output records, at every position, the tuple of
ranks that the true next tokens have under heads 1..K. The paper ranks nodes by the share of positions
whose tuple begins with the node's path (`joint_growth`). We grow trees for decoding by the steps they
save (`growth_by_steps`). Measured step latency then selects the size with the most tokens per second.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from medusa_jax.tree.tree import COPIED, Choice, Order, Tree

# Ranks from this on count as a miss: no useful tree is this wide.
MISS = 64


class TextRanks(NamedTuple):
    """Correct drafts at every position of a text.

    Attributes:
      ranks_PK: ranks of the true next tokens under the heads.
      copied_P: number of next tokens that a chain copied from the text gets right in a row.
      repeats_P: whether a tree with spares uses its copied chain there.
    """

    ranks_PK: np.ndarray
    copied_P: np.ndarray
    repeats_P: np.ndarray

    @classmethod
    def of_heads(cls, ranks_PK: np.ndarray) -> "TextRanks":
        """Positions without copied tokens."""
        P = len(ranks_PK)
        return cls(ranks_PK, np.zeros(P, int), np.zeros(P, bool))

    @classmethod
    def join(cls, texts: "Sequence[TextRanks]") -> "TextRanks":
        """Concatenate the positions of several texts."""
        return cls(*(np.concatenate(column) for column in zip(*texts, strict=True)))


def head_accuracies(tuples_PK: np.ndarray, n_ranks: int = 10) -> np.ndarray:
    """a_k^(i): how often the i-th guess of head k is the right one, [K, n_ranks]."""
    return np.stack([(tuples_PK == i).mean(axis=0) for i in range(n_ranks)], axis=1)


def chain_length(tuples_PK: np.ndarray) -> float:
    """Tokens per step of a chain made of the first guess of every head."""
    return 1.0 + float(np.cumprod(tuples_PK == 0, axis=1).mean(axis=0).sum())


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
    """The nodes that true continuations pass most often, without assuming independence of the heads.

    A node never counts more often than its parent, so the n best nodes always form a tree, the best tree
    of n nodes.
    """
    counts = path_counts(tuples_PK)
    return sorted(counts, key=lambda path: (-counts[path], len(path), path))[:n_choices]


def expected_tokens(tuples_PK: np.ndarray, tree: Tree) -> float:
    """1 + the summed frequencies of the tree's paths, as if steps started uniformly (2.3.3)."""
    counts = path_counts(tuples_PK)
    return 1 + sum(counts[c] for c in tree.choices) / len(tuples_PK)


class Reach:
    """Depth to which the recorded text follows a set of paths, at every position."""

    def __init__(self, ranks_PK: np.ndarray) -> None:
        self.ranks_PK = ranks_PK
        self.depth_P = np.zeros(len(ranks_PK), int)
        self.node_P = np.zeros(len(ranks_PK), int)  # number of the path that agrees
        self.paths: dict[Choice, int] = {(): 0}

    def with_path(self, path: Choice) -> "Reach":
        """Add a path; its parent must be included already."""
        depth, reach = len(path), Reach(self.ranks_PK)
        agrees_P = (self.node_P == self.paths[path[:-1]]) & (self.depth_P == depth - 1)
        agrees_P &= self.ranks_PK[:, depth - 1] == path[-1]
        reach.depth_P = np.where(agrees_P, depth, self.depth_P)
        reach.node_P = np.where(agrees_P, len(self.paths), self.node_P)
        reach.paths = self.paths | {path: len(self.paths)}
        return reach

    def best_child(self, begin_S: np.ndarray) -> Choice | None:
        """The new path that lengthens the most steps among those that begin at these positions."""
        begin_S = begin_S[self.depth_P[begin_S] < self.ranks_PK.shape[1]]
        rank_S = self.ranks_PK[begin_S, self.depth_P[begin_S]]
        child_S = (self.node_P[begin_S] * MISS + rank_S)[rank_S < MISS]
        if not child_S.size:
            return None
        child, times = np.unique(child_S, return_counts=True)
        parent, rank = divmod(int(child[times.argmax()]), MISS)
        return (*list(self.paths)[parent], rank)


class TreeReach(NamedTuple):
    """A tree while it grows.

    Attributes:
      drafted: its drafted nodes.
      elsewhere: drafted nodes and spares, used where the text does not repeat; None without spares.
      n_copied: number of its copied nodes.
    """

    drafted: Reach
    elsewhere: Reach | None
    n_copied: int = 0

    def accepted(self, text: TextRanks) -> np.ndarray:
        """Accepted drafts of a step at every position: [P]."""
        copied_P = np.minimum(text.copied_P, self.n_copied)
        accepted_P = np.maximum(self.drafted.depth_P, copied_P)
        if self.elsewhere is None:
            return accepted_P
        return np.where(text.repeats_P, accepted_P, self.elsewhere.depth_P)

    def with_path(self, path: Choice, spares: Sequence[Choice]) -> "TreeReach":
        """Add a node; `elsewhere` gets the next spare instead of a copied or known node."""
        drafted, n_copied = self.drafted, self.n_copied
        if path[0] == COPIED:
            n_copied += 1
        else:
            drafted = drafted.with_path(path)
        elsewhere = self.elsewhere
        if elsewhere is not None:
            paths = elsewhere.paths
            node = path
            if path[0] == COPIED or path in paths:
                node = next((spare for spare in spares if spare not in paths), ())
            elsewhere = elsewhere.with_path(node) if node else elsewhere
        return TreeReach(drafted, elsewhere, n_copied)


def growth_by_steps(
    texts: Sequence[TextRanks], n_choices: int, spares: Sequence[Choice] = ()
) -> list[Choice]:
    """Add nodes greedily, always the one with which decoding these texts takes the fewest steps.

    Candidates are the drafted node whose token is right most often at the current step starts, and the
    next copied node. Counting positions instead would mislead: copyable text takes a few long steps, in
    which one more token saves less than in short ones.

    Example: six tokens can be copied, then four are each the first guess of their head. [-1] leaves
    3 + 4 of 10 steps. Then [0] leaves 3 + 2 and [-1, -1] 2 + 4, although five positions would use it.

    Args:
      texts: positions of each text, in order.
      spares: spares of the trees, best first; empty: every step copies the copied nodes.
    """
    text = TextRanks.join(texts)
    begins = np.cumsum([0, *(len(text.ranks_PK) for text in texts)]).tolist()
    root = Reach(text.ranks_PK)
    tree, growth = TreeReach(root, root if spares else None), list[Choice]()

    def starts(tree: TreeReach) -> np.ndarray:
        """Positions at which a step begins."""
        next_P = (np.arange(begins[-1]) + tree.accepted(text) + 1).tolist()
        positions = []
        for at, end in itertools.pairwise(begins):
            while at < end:
                positions.append(at)
                at = next_P[at]
        return np.array(positions, int)

    begin_S = starts(tree)
    while len(growth) < n_choices:
        # A child gains nothing where copied tokens reach further, or where spares are used.
        gains_P = tree.drafted.depth_P >= np.minimum(text.copied_P, tree.n_copied)
        if spares:
            gains_P &= text.repeats_P
        options = [tree.drafted.best_child(begin_S[gains_P[begin_S]])]
        if (text.copied_P > tree.n_copied).any():
            options.append((COPIED,) * (tree.n_copied + 1))
        candidates = [(tree.with_path(path, spares), path) for path in options if path]
        if not candidates:
            break
        begins_of = [starts(child) for child, _ in candidates]
        index = min(range(len(candidates)), key=lambda i: len(begins_of[i]))
        (tree, path), begin_S = candidates[index], begins_of[index]
        growth.append(path)
    return growth


def order_by_steps(texts: Sequence[TextRanks], n_choices: int, *, copies: bool) -> Order:
    """The best order of up to `n_choices` nodes for these texts, with copied nodes or without."""
    heads = [TextRanks.of_heads(text.ranks_PK) for text in texts]
    guesses = growth_by_steps(heads, n_choices)
    if not copies:
        return Order(guesses)
    return Order(growth_by_steps(texts, n_choices, guesses), guesses)


def replay(texts: Sequence[TextRanks], tree: Tree) -> tuple[int, int]:
    """Return (tokens, steps) of decoding the recorded texts with this tree.

    After a step that accepts n drafts the next one starts n + 1 positions further, as in decoding,
    so step starts are not uniform over positions.

    Args:
      texts: positions of each text, in order.
    """
    trees = {True: tree, False: tree.drafted if tree.spares else tree}
    facts = {repeats: (set(t.choices), len(t.copied_C)) for repeats, t in trees.items()}
    steps = tokens = 0
    for ranks_PK, copied_P, repeats_P in texts:
        at = 0
        while at < len(ranks_PK):
            nodes, n_copied = facts[bool(repeats_P[at])]
            path: Choice = ()
            for rank in ranks_PK[at].tolist():
                if (*path, rank) not in nodes:
                    break
                path = (*path, rank)
            n_accepted = max(len(path), min(int(copied_P[at]), n_copied))
            gain = min(n_accepted + 1, len(ranks_PK) - at)
            steps, tokens, at = steps + 1, tokens + gain, at + gain
    return tokens, steps


def replayed_tokens(texts: Sequence[TextRanks], tree: Tree) -> float:
    """Mean accepted length of the tree in a replay of these texts."""
    tokens, steps = replay(texts, tree)
    return tokens / max(steps, 1)


def held_out_tokens(
    texts: Sequence[TextRanks],
    grow: Callable[[Sequence[TextRanks]], Order],
    sizes: Sequence[int],
) -> list[float]:
    """Mean accepted length of the best tree of every size, on held-out texts.

    Two folds of whole texts: each half is replayed with the trees grown from the other half. On its own
    texts a large tree looks better than it is, since its last nodes occurred once.

    Args:
      texts: positions of each text, at least two texts.
      sizes: numbers of nodes, root included.
    """
    folds = texts[::2], texts[1::2]
    orders = [grow(fold) for fold in folds]
    lengths = []
    for size in sizes:
        runs = [
            replay(fold, order.tree(size)) for fold, order in zip(folds, reversed(orders))
        ]
        tokens, steps = (sum(column) for column in zip(*runs))
        lengths.append(tokens / max(steps, 1))
    return lengths
