"""`python -m research roofline`: time the three groups of operators here and fit the latency model to them.

As in the Medusa paper's figures 9 to 20, in three phases: reading a prompt (a query per token), decoding one
token, verifying a tree. On a CPU every product is a call, on accelerators several are one program, since a
call there takes longer than most products.
"""

import importlib.util
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

from medusa_jax.commands.flags import DTYPES, Program, at_least, flag, numbers
from medusa_jax.config import LlamaConfig
from medusa_jax.console import inform
from medusa_jax.devices.platforms import platform
from medusa_jax.errors import UserError
from medusa_jax.evaluate.roofline import GROUPS, Operator, Roof, block_operators
from medusa_jax.evaluate.tables import markdown_table
from medusa_jax.kernels.choose import choose_kernels
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.layers import Linear
from medusa_jax.model.placing import choose_storage, store
from medusa_jax.model.product import at_least_f32
from medusa_jax.model.stored import Storage
from medusa_jax.plots.charts import LINE_STYLES
from medusa_jax.plots.style import INK, finish, new_figure, save_figure
from medusa_jax.sharding import make_mesh
from medusa_jax.whole_files import write_json
from research import predictions

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
class Fit:
    """A roof fitted to timings.

    Attributes:
      error: root mean square of log(predicted / measured).
      bound: numbers of points bound by arithmetic, memory and overhead. A figure of the roof that
        bounds no point is not determined by the fit: it stays at the best value seen.
    """

    roof: Roof
    error: float
    bound: tuple[int, int, int]


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


def product_of(
    config: LlamaConfig, case: Case, dtype: Any, kernels: Kernels
) -> tuple[Callable, list[tuple]]:
    """Return (function, shapes of its operands): the product as the model computes it."""
    c = config
    B, G, H, S = case.batch, c.n_kv_heads, c.head_dim, case.length
    rows = case.queries * c.n_heads // G
    if case.operator.name in ("qk", "pv"):
        # Keys times queries and weights times values, as in `model/grouped.py: attend`.
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
    layer = Linear(width, dtype=dtype, kernels=kernels)
    return (
        lambda kernel, x: layer.apply({"params": kernel}, x),
        [(c.d_model, width), (B, case.queries, c.d_model)],
    )


def time_case(
    config: LlamaConfig,
    case: Case,
    dtype: Any,
    rounds: int,
    storage: Storage,
    kernels: Kernels,
) -> float:
    """Median seconds of one product over `rounds` series of consecutive calls."""
    function, shapes = product_of(config, case, dtype, kernels)
    n = 1
    if platform() != "cpu":
        n = max(1, min(TOGETHER, int(TOGETHER_BYTES / case.operator.bytes)))
    copies = max(1, min(MOST_COPIES, math.ceil(SPREAD / case.operator.bytes)))

    def operands() -> tuple[Any, Any]:
        first, second = (jnp.full(shape, 0.5, dtype) for shape in shapes)
        if case.operator.name in ("qk", "pv"):
            return first, second
        kernel = {"kernel": first}
        return store(kernel, storage, kernels), second

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
    mesh = make_mesh()
    kernels = choose_kernels(mesh, dtype, config.head_dim)
    storage = choose_storage(kernels, dtype, mesh)  # as decoding stores kernels here
    for case in tqdm(kept, desc="timing operators", unit="point", disable=None):
        seconds = time_case(config, case, dtype, rounds, storage, kernels)
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


def fit_table(fits: Mapping[str, Fit]) -> str:
    """The fitted latency model of each group; figures that bound no point are shown as a dash."""
    cells = []
    for group, fit in fits.items():
        figures = (
            f"{fit.roof.flops / 1e12:.3f}",
            f"{fit.roof.bandwidth / 1e9:.1f}",
            f"{1e6 * fit.roof.overhead:.1f}",
        )
        shown = (figure if n else "-" for figure, n in zip(figures, fit.bound))
        cells.append(
            (group, *shown, ", ".join(map(str, fit.bound)), f"{100 * fit.error:.0f}%")
        )
    header = (
        "group", "TFLOP/s", "GB/s", "overhead of a call (us)",
        "points bound by arithmetic, memory, overhead", "rms error",
    )  # fmt: skip
    return markdown_table(header, cells)


def draw_measured(
    records: Sequence[dict[str, Any]], fits: Mapping[str, Fit], path: Path, title: str
) -> None:
    """Figures 9 to 20: FLOP/s over intensity of each group by phase, under its fitted roof."""
    charts: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for group in GROUPS:
        series = charts.setdefault(group, {})
        for record in records:
            if record["group"] == group:
                x, y = series.setdefault(record["phase"], ([], []))
                x.append(record["intensity"])
                y.append(record["flops_per_second"])
    roofs = {g: (fit.roof.flops, fit.roof.bandwidth) for g, fit in fits.items()}
    draw_roofline(charts, roofs, path=path, title=title)


def draw_roofline(
    charts: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    roofs: Mapping[str, tuple[float, float]],
    *,
    path: str | Path,
    title: str = "",
) -> Path:
    """Draw achieved FLOP/s over operational intensity, one chart per entry, both axes logarithmic.

    charts: title -> label -> (intensities in FLOPs per byte, FLOP/s), drawn as points.
    roofs: title -> (peak FLOP/s, bytes/s); the line is min(peak, bandwidth x intensity).
    """
    figure = new_figure(4.2 * len(charts), 3.5)
    places = figure.subplots(1, len(charts), squeeze=False)[0]
    for axes, (name, series) in zip(places, charts.items(), strict=True):
        peak, bandwidth = roofs[name]
        for (label, (x, y)), (colour, marker) in zip(
            series.items(), itertools.cycle(LINE_STYLES), strict=False
        ):
            axes.scatter(x, y, s=14, color=colour, marker=marker, label=label, alpha=0.8)
        ridge = peak / bandwidth
        seen = [v for x, _ in series.values() for v in x] or [ridge]
        ends = [min(ridge, *seen) / 2, ridge, max(ridge, *seen) * 2]
        roof = [min(peak, bandwidth * x) for x in ends]
        axes.plot(ends, roof, color=INK, linewidth=1.2, label="roof")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)
        axes.set_ylabel("FLOP/s", color=INK, fontsize=8)
        finish(axes, name, "operational intensity (FLOPs per byte)")
    if title:
        figure.suptitle(title, color=INK, fontsize=10)
    return save_figure(figure, path)


EXAMPLES = """examples:
  python -m research roofline --shape llama-7b
"""


@dataclass(frozen=True, kw_only=True)
class Flags(predictions.Flags):
    """Time products on this device, fit the roofline to them and predict with the fit."""

    measure_batches: tuple[int, ...] = flag("rows", "1,4,16", type=numbers(least=1))
    measure_lengths: tuple[int, ...] = flag(
        "cached tokens", "128,512,2048", type=numbers(least=1)
    )
    measure_trees: tuple[int, ...] = flag(
        "nodes", "4,16,32,64,80,128", type=numbers(least=1)
    )
    most_gflop: float = flag(
        "leave larger products out (default: 100 on a CPU, 20,000 elsewhere)", 0.0
    )
    most_gbyte: float = flag(
        "likewise, by bytes moved (default: 1 on a CPU, 8 elsewhere)", 0.0
    )
    dtype: str | None = flag(
        "of what is timed (default: float32 on CPU, bfloat16 elsewhere)",
        None,
        choices=DTYPES[1:],
    )
    rounds: int = flag("stretches a timing is the median of", 5, type=at_least(1))


def run(flags: Flags) -> int:
    """Time, fit, predict; print the tables, write the files."""
    from medusa_jax.files.shapes import find_shape

    device, out = jax.devices()[0], Path(flags.out)
    on_cpu = device.platform == "cpu"
    dtype = flags.dtype or ("float32" if on_cpu else "bfloat16")
    records, left_out = measure(
        find_shape(flags.shape),
        flags.measure_batches,
        flags.measure_lengths,
        flags.measure_trees,
        dtype=dtype,
        rounds=flags.rounds,
        most_flops=1e9 * (flags.most_gflop or (100 if on_cpu else 20_000)),
        most_bytes=1e9 * (flags.most_gbyte or (1 if on_cpu else 8)),
    )
    fits = fit_roofs(records)
    title = f"{device.device_kind}, {flags.shape}, {dtype}"
    out.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("matplotlib"):
        draw_measured(records, fits, out / "measured.png", title)
    print(f"## {title}: {len(records)} timings, {left_out} points larger than the limits\n")
    print(fit_table(fits), end="\n\n")
    roofs = {group: fit.roof for group, fit in fits.items()}
    size = jnp.dtype(dtype).itemsize
    facts = {
        "device": f"{device.platform}: {device.device_kind}",
        "dtype": dtype,
        "jax": jax.__version__,
        "left_out": left_out,
        "timings": records,
        "fits": {group: asdict(fit) for group, fit in fits.items()},
        "predicted": predictions.predictions(flags, title, roofs, out, size),
    }
    write_json(out / "measured.json", facts)
    inform(f"wrote {out}/measured.json and the pictures")
    return 0


main = Program("python -m research roofline", Flags, run, EXAMPLES)
