"""The roofline of a decoding step (Medusa, appendix G): products, latency, speed-up over the tree's size.

An operator reads its operands and writes its result once; numbers have two bytes. Operational
intensity is FLOPs per byte moved. Linear layers have B q rows, the query tokens of a batch. Attention
is computed per row of the batch and per key/value head, so its intensity does not depend on B.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from medusa_jax.arch import LlamaConfig
from medusa_jax.devices.chips import Chip
from medusa_jax.errors import UserError
from medusa_jax.tree.files import TreeFile

BF16 = 2  # bytes of a number


@dataclass(frozen=True)
class Operator:
    """One matrix product; `flops` and `bytes` are per call."""

    name: str
    flops: float
    bytes: float
    calls: int = 1

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes


def linear(name: str, rows: int, n_in: int, n_out: int) -> Operator:
    """x [rows, n_in] times W [n_in, n_out]."""
    numbers = rows * n_in + n_in * n_out + rows * n_out
    return Operator(name, 2.0 * rows * n_in * n_out, float(BF16 * numbers))


def attention(
    name: str, config: LlamaConfig, batch: int, queries: int, length: int
) -> Operator:
    """Q K^T or P V, which have the same cost: `queries` tokens over `length` cached ones.

    The query heads that share a key/value head are rows of one product, which reads the keys once.
    """
    H, G = config.head_dim, config.n_kv_heads
    rows = queries * config.n_heads // G
    numbers = rows * H + length * H + rows * length
    flops = 2.0 * rows * length * H
    return Operator(name, batch * G * flops, float(batch * G * BF16 * numbers))


def block_operators(
    config: LlamaConfig, batch: int, queries: int, length: int
) -> list[Operator]:
    """The products of one block (the paper's simplified block omits the output projection)."""
    D, F = config.d_model, config.d_ff
    Q, KV = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    rows, text = batch * queries, (config, batch, queries, length)
    return [
        linear("q", rows, D, Q),
        linear("k", rows, D, KV),
        linear("v", rows, D, KV),
        attention("qk", *text),
        attention("pv", *text),
        linear("o", rows, Q, D),
        linear("up", rows, D, F),
        linear("gate", rows, D, F),
        linear("down", rows, F, D),
    ]


def step_operators(
    config: LlamaConfig, batch: int, queries: int, length: int, n_heads: int
) -> list[Operator]:
    """The products of a whole step: all blocks, the LM head on every node and the draft heads.

    The `n_heads` Medusa heads (a residual block and an LM head each) run on one node per row, and only
    if there are drafts (`queries` > 1).
    """
    D, V = config.d_model, config.vocab_size
    block = block_operators(config, batch, queries, length)
    step = [replace(operator, calls=config.n_layers) for operator in block]
    step.append(linear("lm_head", batch * queries, D, V))
    if queries > 1 and n_heads:
        step.append(replace(linear("head, hidden", batch, D, D), calls=n_heads))
        step.append(replace(linear("head, logits", batch, D, V), calls=n_heads))
    return step


# The figures of one tree size, as `speedups` returns them.
Prediction = dict[str, Any]
# Tokens per step by nodes of the tree, root included.
Acceleration = Callable[[int], float]
# The products of a step by its query tokens per row.
Step = Callable[[int], Sequence[Operator]]


def step_seconds(chip: Chip, operators: Iterable[Operator]) -> float:
    """Seconds of the operators run one after another, at the chip's peak figures: a lower bound."""
    return sum(
        operator.calls * max(operator.flops / chip.flops, operator.bytes / chip.bandwidth)
        for operator in operators
    )


def paper_acceleration(nodes: int) -> float:
    """The paper's fit to its figure 4(a): 0.477 log(nodes), at least one token.

    The paper does not give the base. Base 2 gives 2.86 tokens at 64 nodes, close to the accepted
    lengths that it reports; base e would give 1.98. The base scales all speed-ups equally and does
    not move the optimum.
    """
    return max(1.0, 0.477 * math.log2(nodes))


def acceleration_of(curve: str) -> Acceleration:
    """The paper's fit for "paper", else tokens per step from the evidence of this tree file.

    Linear in log(nodes) between the measured sizes, constant outside.

    Raises:
      UserError: the file has no such evidence.
    """
    if curve == "paper":
        return paper_acceleration
    tokens = TreeFile.read(curve).tokens_by_nodes
    if not tokens:
        raise UserError(
            f"{curve} holds no measured tokens per step: write them with `medusa calibrate`"
        )
    x, y = zip(*sorted((math.log(nodes), per_step) for nodes, per_step in tokens.items()))
    return lambda nodes: float(np.interp(math.log(nodes), x, y))


def speedups(
    chip: Chip, step: Step, acceleration: Acceleration, sizes: Iterable[int]
) -> list[Prediction]:
    """Acceleration, latency relative to plain decoding, and speed-up for each tree size."""
    plain = step_seconds(chip, step(1))
    rows = []
    for nodes in sizes:
        seconds = step_seconds(chip, step(nodes))
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


def best(rows: Sequence[Prediction]) -> Prediction:
    """The row with the highest speed-up; the smaller tree if two are equal."""
    return max(rows, key=lambda row: (row["speedup"], -row["nodes"]))
