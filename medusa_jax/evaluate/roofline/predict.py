"""Predicted latency, acceleration and speed-up over the size of the tree (Medusa G.3)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from medusa_jax.chips import Chip
from medusa_jax.errors import UserError
from medusa_jax.evaluate.roofline.operators import GROUPS, Operator
from medusa_jax.tree.files import load_tree_file

# Tokens per step by nodes of the tree, root included.
Acceleration = Callable[[int], float]
# The products of a step by its query tokens per row.
Step = Callable[[int], Sequence[Operator]]


@dataclass(frozen=True)
class Roof:
    """A latency model: an operator takes what its arithmetic or its traffic takes, whichever is
    longer, and `overhead` seconds more for each call."""

    flops: float
    bandwidth: float
    overhead: float = 0.0

    def seconds(self, operator: Operator) -> float:
        """All calls of the operator."""
        bound = max(operator.flops / self.flops, operator.bytes / self.bandwidth)
        return operator.calls * (self.overhead + bound)


@dataclass(frozen=True)
class Fit:
    """A roof found from timings.

    Attributes:
      error: root mean square of log(predicted / measured).
      bound: how many points it takes to be bound by arithmetic, memory and overhead. The figure
        that bounds none is no finding: it stays at the best that was seen.
    """

    roof: Roof
    error: float
    bound: tuple[int, int, int]


# The roof of each group of operators.
Roofs = Mapping[str, Roof]


def roofs_of(chip: Chip) -> Roofs:
    """The chip's peaks for all groups: no kernel is faster."""
    return dict.fromkeys(GROUPS, Roof(chip.flops, chip.bandwidth))


def step_seconds(roofs: Roofs, operators: Iterable[Operator]) -> float:
    """The operators one after the other."""
    return sum(roofs[operator.group].seconds(operator) for operator in operators)


def paper_acceleration(nodes: int) -> float:
    """The paper's fit to its figure 4(a): 0.477 log(nodes), and never less than one token.

    The paper prints no base. With 2 it gives 2.86 tokens at 64 nodes, which is of the order of the
    accepted lengths that it reports; with e it would be 1.98. The base scales all speed-ups alike
    and moves no optimum.
    """
    return max(1.0, 0.477 * math.log2(nodes))


def measured_acceleration(path: str) -> Acceleration:
    """The curve that `calibrate` wrote into a tree file: straight lines in log(nodes) between the
    sizes it measured, flat outside.

    Raises:
      UserError: the file holds no such evidence.
    """
    found = load_tree_file(path)
    ladder = (found.get("evidence") or {}).get("ladder")
    if not ladder:
        raise UserError(
            f"{path} holds no measured tokens per step; `python -m medusa_jax calibrate` writes "
            "them beside the tree"
        )
    x, y = zip(
        *sorted((math.log(rung["nodes"]), rung["tokens_per_step"]) for rung in ladder)
    )
    return lambda nodes: float(np.interp(math.log(nodes), x, y))


def speedups(
    roofs: Roofs, step: Step, acceleration: Acceleration, sizes: Iterable[int]
) -> list[dict[str, Any]]:
    """For each size of the tree: acceleration, latency against plain decoding, their ratio."""
    plain = step_seconds(roofs, step(1))
    rows = []
    for nodes in sizes:
        seconds = step_seconds(roofs, step(nodes))
        tokens = acceleration(nodes)
        rows.append(
            {
                "nodes": nodes,
                "acceleration": tokens,
                "seconds": seconds,
                "step_latency_ratio": seconds / plain,
                "speedup": tokens * plain / seconds,
            }
        )
    return rows


def best(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row with the highest speed-up, the smaller tree if two are alike."""
    return max(rows, key=lambda row: (row["speedup"], -row["nodes"]))
