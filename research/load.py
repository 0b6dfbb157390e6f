"""`python -m research load`: how much longer `serving/ladder.py` takes than the best fixed size in hindsight, simulated.

Clients in a closed loop, texts whose drafts hold more or less, and three curves of what a pass costs. Rates change in
the middle of each text, times are noisy, and after plain steps a row's first drafts are wrong.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from medusa_jax.commands.flags import CommandLine, at_least, flag, numbers
from medusa_jax.console import inform
from medusa_jax.decoding.tree_size.rates import rate_of
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.serving.ladder import PACE, Ladder
from medusa_jax.tree.tree import Tree

# Nodes, depth and tokens per step of sizes of a tree: Hydra++ heads of SmolLM2 with copies, its tree file.
NODES, DEPTHS = (1, 2, 4, 8, 16, 32, 64), (0, 1, 3, 7, 10, 10, 10)
TOKENS = (1.0, 1.6709, 2.3778, 3.0252, 3.5571, 3.8763, 4.0566)
RATES = np.array([rate_of(*pair) for pair in zip(TOKENS, DEPTHS)])
TREES = [
    Tree.from_choices([*Tree.chain(d).choices, *([i] for i in range(1, n - d))])
    for n, d in zip(NODES, DEPTHS)
]
# Nodes to begin with.
FIRST = 8
# Standard deviation of the logarithm of a text's exponent: 8 nodes then give 1.9 to 4.5 tokens for most texts.
SPREAD = 0.5
# Most steps of a chunk.
STEPS = 8

Cost = Callable[[int, int], float]


def cpu(first: float, knee: int, then: float) -> Cost:
    """Seconds of a pass of rows x nodes tokens: each costs a share of one row's, more after the knee."""

    def cost(rows: int, nodes: int) -> float:
        n = rows * nodes
        share = 1 + first * (min(n, knee) - 1) + then * max(0, n - knee)
        return 0.004 * (share + 0.1 * (nodes > 1))

    return cost


def accelerator(rows: int, nodes: int) -> float:
    """Seconds of a pass that is bound by reading weights up to 128 tokens."""
    return 0.008 * (max(1.0, rows * nodes / 128) + 0.08 * (nodes > 1))


# The first is close to SmolLM2's measured steps (weights as stored, 1 to 64 tokens), the second reckons with half as
# wide arithmetic.
CURVES: dict[str, Cost] = {
    "AVX-512": cpu(0.04, 12, 0.068),
    "AVX2": cpu(0.12, 12, 0.14),
    "accelerator": accelerator,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Simulate the rule by which `serve` chooses the size of the tree under load."""

    rows: tuple[int, ...] = flag("rows", (1, 2, 4, 8, 16, 32), type=numbers(least=1))
    answers: int = flag("answers of all clients", 800, type=at_least(1))


class Clients:
    """Clients of a server with as many rows, that each ask again once they are answered.

    Args:
      answers: of all.
    """

    def __init__(self, rows: int, answers: int) -> None:
        texts, self.rng = np.random.default_rng(0), np.random.default_rng(1)
        # The same texts for every choice of sizes; the exponents of both halves.
        self.limit_A = texts.integers(16, 129, answers)
        self.exponent_A2 = np.exp(SPREAD * texts.standard_normal((answers, 2)))
        self.next, self.answer_R = 0, np.zeros(rows, int)
        self.tokens, self.length_R = 0, np.zeros(rows, int)
        self.has_gap_R, self.stale_R = np.zeros(rows, bool), np.zeros(rows, bool)
        self.ended_R = np.ones(rows, bool)

    def ask(self) -> bool:
        """Clients whose answers have ended ask again; returns whether there are answers left for all."""
        rows = np.flatnonzero(self.ended_R)
        self.answer_R[rows] = self.next + np.arange(len(rows))
        self.next += len(rows)
        self.length_R[rows] = 0
        self.has_gap_R[rows] = self.stale_R[rows] = False
        return self.next < len(self.limit_A)

    def step(self, index: int) -> np.ndarray:
        """Take a step with one size; returns the tokens of each row."""
        depth, limit_R = DEPTHS[index], self.limit_A[self.answer_R]
        half_R = (self.length_R >= limit_R // 2).astype(int)
        tokens_R = np.ones_like(self.length_R)
        if depth:
            exponent_R = self.exponent_A2[self.answer_R, half_R]
            right_RL = self.rng.random((len(half_R), depth)) < (
                RATES[index] ** exponent_R[:, None]
            )
            tokens_R += np.cumprod(right_RL, axis=1).sum(1) * ~self.stale_R
        self.stale_R[:] = depth == 0
        self.has_gap_R |= depth == 0
        self.length_R = self.length_R + tokens_R
        self.tokens += int(tokens_R.sum())
        self.ended_R = self.length_R >= limit_R
        return tokens_R


def speed(rows: int, cost: Cost, answers: int, index: int | None = None) -> float:
    """Tokens per second with one fixed size, or with the ladder's choices."""
    clients, noise = Clients(rows, answers), np.random.default_rng(1)
    ladder, now = Ladder(TREES, TOKENS), 0.0
    costs = ladder.costs[""]
    counts_R3L = [ladder.begin() for _ in range(rows)]
    while True:
        for row in np.flatnonzero(clients.ended_R):
            counts_R3L[row] = ladder.begin()
        if not clients.ask():
            return clients.tokens / now
        nodes = NODES[index or 0]
        if index is None:
            nodes, _ = ladder.choose("", rows, FIRST, counts_R3L, NODES)
        seconds = cost(rows, nodes)
        expected_seconds = costs.measured(rows, nodes) or PACE / 2
        steps = max(1, min(STEPS, int(PACE / expected_seconds)))
        steps_RL, taken = np.zeros((rows, max(DEPTHS) + 1), int), 0
        while taken < steps and (taken == 0 or not clients.ended_R.any()):
            taken += 1
            steps_RL[np.arange(rows), clients.step(NODES.index(nodes)) - 1] += 1
        now += taken * seconds
        # Other work only adds time.
        noisy = seconds * (1 + noise.exponential(0.05) + (noise.random() < 0.1) * 0.5)
        costs.add(rows, nodes, taken * noisy, taken)
        for counts_3L, steps_L, has_gap in zip(counts_R3L, steps_RL, clients.has_gap_R):
            ladder.count(counts_3L, steps_L, nodes, bool(has_gap))


def regret(rows: int, cost: Cost, answers: int) -> tuple[float, int]:
    """How much longer the ladder takes than the best fixed size, and the nodes of that one."""
    # A pass of more tokens is never the best.
    n_sizes = sum(rows * nodes <= 256 for nodes in NODES)
    fixed = [speed(rows, cost, answers, index) for index in range(n_sizes)]
    best = int(np.argmax(fixed))
    return fixed[best] / speed(rows, cost, answers) - 1, NODES[best]


def run(flags: Flags) -> int:
    """Print the table."""
    cells = []
    for name, cost in CURVES.items():
        found = [regret(rows, cost, flags.answers) for rows in flags.rows]
        cells.append([name, *(f"{more:+.1%} of {nodes}" for more, nodes in found)])
    inform(markdown_table(["regret", *(f"{rows} rows" for rows in flags.rows)], cells))
    return 0


main = CommandLine("python -m research load", Flags, run)
