"""Predicted latency, acceleration and speed-up over the size of the tree (Medusa G.3)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from medusa_jax.devices.chips import Chip
from medusa_jax.errors import UserError
from medusa_jax.evaluate.roofline.operators import GROUPS, Operator
from medusa_jax.tree.files import load_tree_file

# Tokens per step by nodes of the tree, root included.
Acceleration = Callable[[int], float]
# The products of a step by its query tokens per row.
Step = Callable[[int], Sequence[Operator]]


@dataclass(frozen=True)
class Roof:
    """Latency model: a call takes max(arithmetic time, memory time) + `overhead` seconds."""

    flops: float
    bandwidth: float
    overhead: float = 0.0

    def seconds(self, operator: Operator) -> float:
        """Seconds of all calls of the operator."""
        bound = max(operator.flops / self.flops, operator.bytes / self.bandwidth)
        return operator.calls * (self.overhead + bound)


# The roof of each group of operators.
Roofs = Mapping[str, Roof]


def roofs_of(chip: Chip) -> Roofs:
    """The chip's peak figures for all groups: a lower bound on latency."""
    return dict.fromkeys(GROUPS, Roof(chip.flops, chip.bandwidth))


def step_seconds(roofs: Roofs, operators: Iterable[Operator]) -> float:
    """Seconds of the operators run one after another."""
    return sum(roofs[operator.group].seconds(operator) for operator in operators)


def paper_acceleration(nodes: int) -> float:
    """The paper's fit to its figure 4(a): 0.477 log(nodes), at least one token.

    The paper does not give the base. Base 2 gives 2.86 tokens at 64 nodes, close to the accepted
    lengths that it reports; base e would give 1.98. The base scales all speed-ups equally and does
    not move the optimum.
    """
    return max(1.0, 0.477 * math.log2(nodes))


def measured_acceleration(path: str) -> Acceleration:
    """Tokens per step from the evidence of a tree file.

    Linear in log(nodes) between the measured sizes, constant outside.

    Raises:
      UserError: the file has no such evidence.
    """
    found = load_tree_file(path)
    ladder = (found.get("evidence") or {}).get("ladder")
    if not ladder:
        raise UserError(
            f"{path} holds no measured tokens per step: write them with "
            "`python -m medusa_jax calibrate`"
        )
    x, y = zip(
        *sorted((math.log(rung["nodes"]), rung["tokens_per_step"]) for rung in ladder)
    )
    return lambda nodes: float(np.interp(math.log(nodes), x, y))


def speedups(
    roofs: Roofs, step: Step, acceleration: Acceleration, sizes: Iterable[int]
) -> list[dict[str, Any]]:
    """Acceleration, latency relative to plain decoding, and speed-up for each tree size."""
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
    """The row with the highest speed-up; the smaller tree if two are equal."""
    return max(rows, key=lambda row: (row["speedup"], -row["nodes"]))
