"""Decode steps of a 7B model with random weights: time, kernels, bytes, the loop, a profile."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.api import DEMO, Model
from medusa_jax.api.loaded_drafter import LoadedDrafter
from medusa_jax.config import LlamaConfig
from medusa_jax.decoding.loop import decode_loop
from medusa_jax.decoding.state import Engine
from medusa_jax.evaluate.step_clock import StepClock, run_steps
from medusa_jax.evaluate.weight_bytes import bytes_per_token
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import Params, make_mesh
from medusa_jax.text.tokenizer import NoTokenizer
from medusa_jax.tree.files import TreeFile
from research.bandwidth import read_bandwidth
from research.compiled.costs import kernels_of
from research.hardware.profile import profiled
from research.hardware.record import Record
from research.shapes import SHAPES
from research.weights import plain_form, random_backbone, random_heads

SHAPE, CONTEXT, STEPS = "llama-7b", 800, 16
# The growth order of the demo's Hydra heads is as deep as the papers' trees of 64 nodes: four levels.
GROWTH, N_HEADS = DEMO / "hydra" / "tree.json", 4
DTYPE = jnp.dtype(jnp.bfloat16)
# (batch, nodes, drafters), most valuable first; 1 node is plain decoding.
Plan = Sequence[tuple[int, tuple[int, ...], tuple[str, ...]]]
PLAN: Plan = (
    (1, (1, 16, 64), ("medusa",)),
    (8, (1, 16, 64), ("medusa",)),
    (1, (1, 64), ("eagle3", "hydra")),
    (32, (1, 8, 16), ("medusa",)),
    (1, (1, 64), ("hydrapp", "amphista", "eagle")),
)
SMALL_PLAN: Plan = ((2, (1, 8), ("medusa",)), (1, (1, 8), ("medusa",)))
# Whose programs are read and profiled, and whose loop is timed.
READ = ("medusa", "eagle3")


class Timed(NamedTuple):
    """A model, and the engines of its trees by number of nodes, on one clock."""

    model: Model
    engines: dict[int, Engine]
    clock: StepClock


def run(record: Record) -> None:
    """Every row of the plan that there is time for, then what the programs of some are made of."""
    config = SHAPES[SHAPE]
    if record.small:
        config = replace(
            config,
            vocab_size=512,
            d_model=256,
            n_layers=3,
            n_heads=2,
            n_kv_heads=2,
            d_ff=512,
        )
    backbone = random_backbone(config, DTYPE, Storage(), make_mesh((1, 1, 1)))
    jax.block_until_ready(backbone)
    speed = read_bandwidth(sum(x.nbytes for x in jax.tree.leaves(backbone)), rounds=3)
    record.row("weights", shape=SHAPE, gb_per_second=speed / 1e9)
    context, longest = 40 if record.small else CONTEXT, 0.0
    plan = SMALL_PLAN if record.small else PLAN
    jobs = [("step", *row) for row in rows_of(plan)]
    jobs += [("look", *row) for row in rows_of(plan) if row[0] == 1 and row[1] in READ]
    for title, batch, name, sizes in jobs:
        if record.left() < longest + 5:
            record.row("out of time", drafter=name, batch=batch)
            return
        began = time.monotonic()
        with record.trying(title, drafter=name, batch=batch):
            timed = timed_model(config, backbone, name, sizes, batch, context)
            if title == "step":
                measure(record, timed, batch, context, speed)
            else:
                look(record, timed)
            del timed  # before the next
        longest = max(longest, time.monotonic() - began)


def rows_of(plan: Plan) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """(batch, drafter, nodes), in order."""
    for batch, sizes, names in plan:
        for name in names:
            yield batch, name, sizes


def timed_model(
    config: LlamaConfig,
    backbone: Params,
    name: str,
    sizes: Sequence[int],
    batch: int,
    context: int,
) -> Timed:
    """A drafter with random heads and trees of these sizes, ready to be timed."""
    drafter = make_drafter(
        drafter_class(name).Config(drafter=name, n_heads=N_HEADS), config
    )
    mesh = make_mesh((1, 1, 1))
    form = plain_form(DTYPE, mesh, config.head_dim)
    loaded = LoadedDrafter(drafter, random_heads(drafter, DTYPE, form.storage))
    model = Model(config, backbone, loaded, NoTokenizer("a shape"), form, mesh, eos_ids=())
    file = TreeFile.read(GROWTH)
    engines = {n: model.engine(file.of_size(n)) for n in sizes}
    clock = StepClock(
        list(engines.values()), model.variables, [1] * context, batch=batch, n_steps=STEPS
    )
    return Timed(model, engines, clock)


def measure(record: Record, timed: Timed, batch: int, context: int, speed: float) -> None:
    """Interleaved steps with each tree.

    Args:
      speed: bytes per second that this device reads.
    """
    model, engines, clock = timed
    first_seconds: dict[int, float] = {}
    for n, engine in engines.items():
        began = time.monotonic()
        clock.seconds(engine)
        first_seconds[n] = time.monotonic() - began
    rounds = [[clock.seconds(e) for e in engines.values()] for _ in range(5)]
    medians = [statistics.median(times) for times in zip(*rounds)]
    weights = bytes_per_token(model, 0)
    n_bytes = weights + batch * (bytes_per_token(model, context) - weights)
    heads = sum(x.nbytes for x in jax.tree.leaves(model.variables["heads"]))
    for i, n in enumerate(engines):
        bound = (n_bytes + (heads if n > 1 else 0)) / speed
        record.row(
            "step",
            drafter=drafter_of(model, n),
            batch=batch,
            nodes=n,
            slots=clock.slots,
            ms=1e3 * medians[i],
            least_ms=1e3 * min(r[i] for r in rounds),
            ratio=medians[i] / medians[0],
            share_of_bandwidth=bound / medians[i],
            compile_seconds=first_seconds[n],
        )


def drafter_of(model: Model, nodes: int) -> str:
    """The drafter's name; without drafts "plain"."""
    return model.drafter.name if nodes > 1 else "plain"


def look(record: Record, timed: Timed) -> None:
    """The loop of decoding, the program and a profile of each tree."""
    model, engines, clock = timed
    for n, engine in engines.items():
        facts = {"drafter": drafter_of(model, n), "nodes": n}
        if n == 1 and model.drafter.name != READ[0]:
            continue
        with record.trying("loop", **facts):
            record.row("loop", **facts, **loop_figures(clock, engine))
        with record.trying("kernels", **facts):
            record.row("kernels", **facts, **program_figures(clock, engine))
        with record.trying("profile", **facts):
            for figures in profiled(partial(clock.seconds, engine), clock.n_steps):
                record.row("profile", **facts, **figures)


def loop_figures(clock: StepClock, engine: Engine) -> dict[str, float]:
    """The loop of decoding, whose condition is data: milliseconds a step, and when the call returns."""
    times = []
    for _ in range(4):
        state = run_steps(engine, clock.variables, clock.begin(engine), np.int32(0))
        jax.block_until_ready(state)
        begin = time.perf_counter()
        out = decode_loop(engine, clock.variables, state, np.int32(clock.n_steps))
        dispatch = time.perf_counter() - begin
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin, dispatch))
    total, dispatch = min(times[1:])
    return {"ms": 1e3 * total / clock.n_steps, "returned_after_share": dispatch / total}


def program_figures(clock: StepClock, engine: Engine) -> dict[str, float]:
    """Kernels of a step and bytes that they read, in the compiled program (as `compile` counts them)."""
    state = clock.begin(engine)
    compiled = run_steps.lower(engine, clock.variables, state, np.int32(1)).compile()
    kernels, n_bytes = kernels_of(compiled, engine.llama.config.n_layers)
    return {"kernels": kernels, "gb_read": n_bytes / 1e9}
