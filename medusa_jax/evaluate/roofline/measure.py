"""Time the three groups of operators on this device and fit the latency model to them.

As in the paper's figures 9 to 20, in three phases: reading a prompt (a query per token), decoding one
token, verifying a tree. On a CPU every product is a call, on accelerators several are one program, since a
call there takes longer than most products.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

from medusa_jax.config import LlamaConfig
from medusa_jax.devices.platforms import platform
from medusa_jax.errors import UserError
from medusa_jax.evaluate.roofline.operators import GROUPS, Operator, block_operators
from medusa_jax.evaluate.roofline.predict import Fit, Roof
from medusa_jax.model.layers import Linear
from medusa_jax.model.placing import choose_storage
from medusa_jax.model.product import at_least_f32
from medusa_jax.model.stored import Storage, store
from medusa_jax.sharding import make_mesh

# Calls cycle through operands of this many bytes, so that caches do not hold them from call to call,
# as they would not in a model of many blocks.
SPREAD = 256 * 2**20
MOST_COPIES = 1024
# Products of a program on accelerators, and most bytes of their operands.
TOGETHER, TOGETHER_BYTES = 16, 2 * 2**30
# Seconds of one timed series of calls.
STRETCH = 0.02
# Operators timed: q stands for k, v and o, up for gate and down.
TIMED = ("q", "qk", "pv", "up")


@dataclass(frozen=True)
class Case:
    """An operator at one point: `queries` query tokens of each of `batch` rows, `length` cached."""

    operator: Operator
    phase: str
    batch: int
    queries: int
    length: int


def cases(
    config: LlamaConfig,
    batches: Sequence[int],
    lengths: Sequence[int],
    trees: Sequence[int],
    size: int,
) -> Iterator[Case]:
    """All points. Linear layers do not depend on cached tokens: decode and tree phases use one length."""
    for batch, length in itertools.product(batches, lengths):
        phases = [("prefill", length), ("decode", 1), *(("tree", n) for n in trees)]
        for phase, queries in phases:
            for operator in block_operators(config, batch, queries, length, size):
                alike = operator.name in ("q", "up") and phase != "prefill"
                if operator.name in TIMED and not (alike and length != lengths[0]):
                    yield Case(operator, phase, batch, queries, length)


def product_of(config: LlamaConfig, case: Case, dtype: Any) -> tuple[Callable, list[tuple]]:
    """Return (function, shapes of its operands): the product as the model computes it."""
    c = config
    B, G, H, S = case.batch, c.n_kv_heads, c.head_dim, case.length
    rows = case.queries * c.n_heads // G
    if case.operator.name in ("qk", "pv"):
        # Keys times queries and weights times values, as in `model/attention.py: attend`.
        other = (B, G, rows, H) if case.operator.name == "qk" else (B, G, rows, S)
        contract = ((3,), (3,)) if case.operator.name == "qk" else ((2,), (3,))
        dot = partial(
            lax.dot_general,
            dimension_numbers=(contract, ((0, 1), (0, 1))),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=at_least_f32(dtype),
        )
        return lambda x, y: dot(x, y).astype(dtype), [(B, G, S, H), other]
    width = c.n_heads * H if case.operator.name == "q" else c.d_ff
    layer = Linear(width, dtype=dtype)
    return (
        lambda kernel, x: layer.apply({"params": kernel}, x),
        [(c.d_model, width), (B, case.queries, c.d_model)],
    )


def time_case(
    config: LlamaConfig, case: Case, dtype: Any, rounds: int, storage: Storage
) -> float:
    """Median seconds of one product over `rounds` series of consecutive calls."""
    function, shapes = product_of(config, case, dtype)
    n = 1
    if platform() != "cpu":
        n = max(1, min(TOGETHER, int(TOGETHER_BYTES / case.operator.bytes)))
    copies = max(1, min(MOST_COPIES, math.ceil(SPREAD / case.operator.bytes)))

    def operands() -> tuple[Any, Any]:
        first, second = (jnp.full(shape, 0.5, dtype) for shape in shapes)
        if case.operator.name in ("qk", "pv"):
            return first, second
        kernel = {"kernel": first}
        return store(kernel, storage), second

    groups = [[operands() for _ in range(n)] for _ in range(math.ceil(copies / n))]
    jax.block_until_ready(groups)
    run = jax.jit(lambda group: [function(*pair) for pair in group])
    jax.block_until_ready(run(groups[0]))  # compile

    def stretch(calls: int) -> float:
        start = time.perf_counter()
        for i in range(calls):
            out = run(groups[i % len(groups)])
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls / n

    calls = max(1, min(1000, math.ceil(STRETCH / n / stretch(1))))
    return statistics.median(stretch(calls) for _ in range(rounds))


def measure(
    config: LlamaConfig,
    batches: Sequence[int],
    lengths: Sequence[int],
    trees: Sequence[int],
    *,
    dtype: Any,
    rounds: int,
    most_flops: float,
    most_bytes: float,
) -> tuple[list[dict[str, Any]], int]:
    """Return (one record per point, number of points skipped for exceeding a limit).

    Raises:
      UserError: the limits leave a group without a point.
    """
    size = jnp.dtype(dtype).itemsize
    everything = list(cases(config, batches, lengths, trees, size))
    kept = [
        c for c in everything
        if c.operator.flops <= most_flops and c.operator.bytes <= most_bytes
    ]  # fmt: skip
    if {c.operator.group for c in kept} != set(GROUPS):
        raise UserError(
            "every point of a group is larger than --most_gflop or --most_gbyte allow"
        )
    records = []
    storage = choose_storage(config, dtype, make_mesh())  # as decoding stores kernels here
    for case in tqdm(kept, desc="timing operators", unit="point", disable=None):
        seconds = time_case(config, case, dtype, rounds, storage)
        o = case.operator
        records.append(
            {
                "operator": o.name,
                "group": o.group,
                "phase": case.phase,
                "batch": case.batch,
                "queries": case.queries,
                "length": case.length,
                "flops": o.flops,
                "bytes": o.bytes,
                "intensity": o.intensity,
                "seconds": seconds,
                "flops_per_second": o.flops / seconds,
            }
        )
    return records, len(everything) - len(kept)


def fit_roof(records: Sequence[dict[str, Any]]) -> Fit:
    """Fit the roof to the timings.

    Peak, bandwidth and overhead minimise the squared errors of log seconds, so that short and long
    calls weigh the same.
    """
    from scipy.optimize import least_squares

    flops, moved, seconds = (
        np.array([record[name] for record in records])
        for name in ("flops", "bytes", "seconds")
    )

    def off(logs: np.ndarray) -> np.ndarray:
        peak, bandwidth, overhead = np.exp(logs)
        return np.log((overhead + np.maximum(flops / peak, moved / bandwidth)) / seconds)

    peaks = [(flops / seconds).max(), (moved / seconds).max(), seconds.min() / 2]
    found = least_squares(off, np.log(peaks))
    roof = Roof(*map(float, np.exp(found.x)))
    parts = [flops / roof.flops, moved / roof.bandwidth, np.full(len(flops), roof.overhead)]
    bound = np.bincount(np.argmax(parts, axis=0), minlength=3)
    arithmetic, memory, overhead = map(int, bound)
    error = float(np.sqrt(np.mean(found.fun**2)))
    return Fit(roof, error, (arithmetic, memory, overhead))


def fit_roofs(records: Sequence[dict[str, Any]]) -> dict[str, Fit]:
    """`fit_roof` of each group."""
    return {
        group: fit_roof([record for record in records if record["group"] == group])
        for group in GROUPS
    }
