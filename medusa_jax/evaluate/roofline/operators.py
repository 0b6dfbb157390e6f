"""The matrix products of a decoding step: arithmetic and memory traffic (Medusa G.1).

An operator reads its operands and writes its result once; `size` is bytes per number. Operational
intensity is FLOPs per byte moved. Linear layers have B q rows, the query tokens of a batch. Attention
is computed per row of the batch and per key/value head, so its intensity does not depend on B.
"""

from dataclasses import dataclass, replace

from medusa_jax.arch import LlamaConfig

BF16 = 2  # bytes of a number

# The groups of the paper's figures. The LM head and the draft heads count as wide linear layers.
QKV, ATTENTION, MLP = "q/k/v/o", "qk/pv", "up/gate/down"
GROUPS = (QKV, ATTENTION, MLP)


@dataclass(frozen=True)
class Operator:
    """One matrix product; `flops` and `bytes` are per call."""

    name: str
    group: str
    flops: float
    bytes: float
    calls: int = 1

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes


def linear(
    name: str, group: str, rows: int, n_in: int, n_out: int, size: int = BF16
) -> Operator:
    """x [rows, n_in] times W [n_in, n_out]."""
    numbers = rows * n_in + n_in * n_out + rows * n_out
    return Operator(name, group, 2.0 * rows * n_in * n_out, float(size * numbers))


def attention(
    name: str, config: LlamaConfig, batch: int, queries: int, length: int, size: int = BF16
) -> Operator:
    """Q K^T or P V, which have the same cost: `queries` tokens over `length` cached ones.

    The query heads that share a key/value head are rows of one product, which reads the keys once.
    """
    H, G = config.head_dim, config.n_kv_heads
    rows = queries * config.n_heads // G
    numbers = rows * H + length * H + rows * length
    flops = 2.0 * rows * length * H
    return Operator(name, ATTENTION, batch * G * flops, float(batch * G * size * numbers))


def block_operators(
    config: LlamaConfig, batch: int, queries: int, length: int, size: int = BF16
) -> list[Operator]:
    """The products of one block (the paper's simplified block omits the output projection)."""
    D, F = config.d_model, config.d_ff
    Q, KV = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    rows, text = batch * queries, (config, batch, queries, length, size)
    return [
        linear("q", QKV, rows, D, Q, size),
        linear("k", QKV, rows, D, KV, size),
        linear("v", QKV, rows, D, KV, size),
        attention("qk", *text),
        attention("pv", *text),
        linear("o", QKV, rows, Q, D, size),
        linear("up", MLP, rows, D, F, size),
        linear("gate", MLP, rows, D, F, size),
        linear("down", MLP, rows, F, D, size),
    ]


def step_operators(
    config: LlamaConfig,
    batch: int,
    queries: int,
    length: int,
    n_heads: int,
    size: int = BF16,
) -> list[Operator]:
    """The products of a whole step: all blocks, the LM head on every node and the draft heads.

    The `n_heads` Medusa heads (a residual block and an LM head each) run on one node per row, and only
    if there are drafts (`queries` > 1).
    """
    D, V = config.d_model, config.vocab_size
    block = block_operators(config, batch, queries, length, size)
    step = [replace(operator, calls=config.n_layers) for operator in block]
    step.append(linear("lm_head", MLP, batch * queries, D, V, size))
    if queries > 1 and n_heads:
        step.append(replace(linear("head, hidden", QKV, batch, D, D, size), calls=n_heads))
        step.append(replace(linear("head, logits", MLP, batch, D, V, size), calls=n_heads))
    return step
