"""Which form of stored kernels is fastest here: measured, once for each machine and model shape.

A product of few rows takes up to twice as long in one form as in another, and which one depends on
the processor, its caches, its memory and the shapes. Plain decoding reads the same kernels as the
tree does: it gets the form that is fastest for one row, and the rows of a tree decide only where
that is nearly a draw.
"""

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.config import LlamaConfig
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.measured import PRODUCTS, DeviceCache, in_rounds, within
from medusa_jax.model.stored import (
    DRAFT_WEIGHTS,
    STORED,
    WEIGHTS,
    Storage,
    StoredKernel,
    multiply,
    store,
)
from medusa_jax.native import library

VARIABLE = "MEDUSA_JAX_PRODUCTS"
NAMES = ("plain", "native")
# Rows of a product in plain decoding, and with a small tree.
ONE, TREE = 1, 8
# Faster by less than this is a draw for one row; the tree's rows decide.
DRAW = 1.05
# As many layers as fill this, or as the model has: kernels that fit a cache must be timed in it.
BYTES = 2**28
# Every case is timed at most this often.
ROUNDS = 32


def choose_storage(
    config: LlamaConfig,
    dtype: DTypeLike,
    mesh: Mesh,
    weights: str | None = None,
    draft_weights: str | None = None,
) -> Storage:
    """The form for this model on this device; `MEDUSA_JAX_PRODUCTS` (plain, native) overrides.

    Args:
      weights: type to store kernels in, of `WEIGHTS`; None is `dtype`.
      draft_weights: that of draft heads, of `DRAFT_WEIGHTS`; None is as `Storage` has it.

    Raises:
      UserError: an unknown type or form, or one that is not available here.
    """
    for what, given, known in (
        ("weights are", weights, WEIGHTS),
        ("draft weights are", draft_weights, DRAFT_WEIGHTS),
    ):
        if given not in (None, *known):
            names = f"{', '.join(known[:-1])} or {known[-1]}"
            raise UserError(f"{what} {names}, not {given!r}{did_you_mean(given, known)}")
    if "int8" in (weights, draft_weights) and mesh.size > 1:
        raise UserError("int8 weights are read on one device: use --mesh 1,1,1")
    number = jnp.dtype(dtype).name
    plain = Storage(0, "" if weights in (None, number) else weights, draft_weights or "")
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", *NAMES):
        raise UserError(f"{VARIABLE} is {' or '.join(NAMES)}, not {asked!r}")
    on_cpu = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    if asked == "plain" or not on_cpu or number not in ("float32", "bfloat16"):
        return plain
    native = library()
    if native is None and asked == "native":
        raise UserError(
            f"{VARIABLE}=native needs a C++ compiler (c++, or what CXX names) that can build "
            "the kernels for this processor"
        )
    if native is None:
        return plain
    panels = replace(plain, panel=native.panel)
    if (
        weights == STORED
        or asked == "native"
        or _faster(config, dtype, panels, native.path) == "native"
    ):
        return panels
    return plain


def reads_blocks(dtype: DTypeLike, mesh: Mesh) -> bool:
    """Whether weights can be read here in the blocks of a GGUF file."""
    on_cpu = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    native = on_cpu and dtype == jnp.float32 and os.environ.get(VARIABLE) != "plain"
    return native and library() is not None


# Seconds by (form, rows).
Times = dict[tuple[str, int], list[float]]


def _faster(config: LlamaConfig, dtype: DTypeLike, panels: Storage, kernels: str) -> str:
    """The name of the faster form, from the user's cache or measured now."""
    shapes, weights = layer_shapes(config), panels.weights
    marks = (Path(kernels).name, config.n_layers, shapes, str(dtype), weights)
    kept = DeviceCache("products", *marks)
    if (form := kept.read("form", str)) in NAMES:
        return form
    forms = {"plain": Storage(0, weights), "native": Storage(panels.panel, weights)}
    times: Times = {(name, rows): [] for name in NAMES for rows in (ONE, TREE)}
    measure = partial(time_products, config, dtype, forms, times)
    within(PRODUCTS, "which products are fastest", measure)
    least = {case: min(seconds, default=0.0) for case, seconds in times.items()}
    seconds = {name: [least[name, rows] for rows in (ONE, TREE)] for name in NAMES}
    # Too slow a machine to tell: the native ones, which were faster wherever they were measured.
    form = decided(seconds) if all(times.values()) else "native"
    kept.write({"form": form, "rows": [ONE, TREE], "seconds": seconds, "kernels": shapes})
    return form


def decided(seconds: Mapping[str, list[float]]) -> str:
    """The form that is fastest for one row; within `DRAW`, the one that is for a tree's.

    Example: plain [1.00, 3.0], native [1.02, 1.2] -> native.
    """
    best = min(s[0] for s in seconds.values())
    near = {name: s[1] for name, s in seconds.items() if s[0] <= DRAW * best}
    return min(near, key=lambda name: near[name])


def layer_shapes(config: LlamaConfig) -> list[tuple[int, int]]:
    """[inputs, outputs] of a layer's kernels as decoding reads them."""
    c = config
    heads = c.head_dim * c.n_heads
    qkv = heads + 2 * c.head_dim * c.n_kv_heads
    return [
        (c.d_model, qkv),
        (heads, c.d_model),
        (c.d_model, 2 * c.d_ff),
        (c.d_ff, c.d_model),
    ]


def time_products(
    config: LlamaConfig,
    dtype: DTypeLike,
    forms: Mapping[str, Storage],
    times: Times,
    over: threading.Event,
) -> None:
    """Time all products of the layers with each form, the cases of `times` in turn.

    The least counts, not the median: other work on the machine only ever adds, and the choice is kept.

    Args:
      times: gets the seconds of each round.
      over: ends it.
    """
    shapes = tuple(layer_shapes(config))
    kernels = [np.full(shape, shape[0] ** -0.5, dtype) for shape in shapes]
    n_layers = min(config.n_layers, max(1, BYTES // sum(k.nbytes for k in kernels)))
    place = jax.jit(store, static_argnums=1)
    products = jax.jit(_products, static_argnums=(2, 3))
    layers: dict[str, list[list[StoredKernel]]] = {name: [] for name in forms}
    for name in n_layers * list(forms):
        if over.is_set():
            return
        placed = place({str(i): {"kernel": k} for i, k in enumerate(kernels)}, forms[name])
        layers[name].append([part["kernel"] for part in placed.values()])

    def seconds(name: str, rows: int) -> float:
        start = time.perf_counter()
        x_RD = np.ones((rows, config.d_model), dtype)
        jax.block_until_ready(products(layers[name], x_RD, dtype, shapes))
        return time.perf_counter() - start

    runs = [partial(seconds, *case) for case in times]
    for n, found in enumerate(in_rounds(runs, 1 + ROUNDS, over)):
        for own, spent in zip(times.values(), found if n else ()):  # the first compiles
            own.append(spent)


def _products(
    layers: list[list[StoredKernel]],
    x_RD: jax.Array,
    dtype: DTypeLike,
    shapes: tuple[tuple[int, int], ...],
) -> jax.Array:
    """The products of all layers, one after another; each takes the first of what came before."""

    @jax.jit
    def layer(kernels: list[StoredKernel], x_RD: jax.Array) -> jax.Array:
        y = x_RD
        for kernel, (inputs, _) in zip(kernels, shapes):
            y = multiply(y[:, :inputs], kernel, dtype).astype(dtype)
        return x_RD + y

    for kernels in layers:
        x_RD = layer(kernels, x_RD)
    return x_RD
