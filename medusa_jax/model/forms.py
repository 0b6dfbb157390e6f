"""Which form of stored kernels is fastest here: measured, once for each machine and model shape.

A product of few rows takes up to twice as long in one form as in another, and which one depends on
the processor, its caches, its memory and the shapes. Plain decoding reads the same kernels as the
tree does: it gets the form that is fastest for one row, and the rows of a tree decide only where
that is nearly a draw.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from medusa_jax.config import LlamaConfig
from medusa_jax.console import announced
from medusa_jax.errors import UserError
from medusa_jax.measured import Kept
from medusa_jax.model.product import at_least_f32
from medusa_jax.model.stored import DRAFT_WEIGHTS, WEIGHTS, Storage, multiply, store
from medusa_jax.native import library

VARIABLE = "MEDUSA_JAX_PRODUCTS"
NAMES = ("plain", "native")
# Rows of a product in plain decoding, and with a small tree.
ONE, TREE = 1, 8
# Faster by less than this is a draw for one row; the tree's rows decide.
DRAW = 1.05
# As many layers as fill this, or as the model has: kernels that fit a cache must be timed in it.
BYTES = 2**28
# Every form is timed so often, and as often again as there is time for.
ROUNDS, SECONDS = 9, 1.0


def choose_storage(
    config: LlamaConfig,
    dtype: Any,
    mesh: Mesh,
    weights: str | None = None,
    draft_weights: str | None = None,
) -> Storage:
    """The form for this model on this device; `MEDUSA_JAX_PRODUCTS` (plain, native) overrides.

    Args:
      weights: type to store kernels in, of `WEIGHTS`; None is `dtype`.
      draft_weights: that of draft heads, of `DRAFT_WEIGHTS`; None is as `Storage` has it.

    Raises:
      UserError: an unknown type or form, or one that cannot be had here.
    """
    if weights not in (None, *WEIGHTS):
        raise UserError(f"weights are stored as {' or '.join(WEIGHTS)}, not {weights!r}")
    if draft_weights not in (None, *DRAFT_WEIGHTS):
        raise UserError(
            f"draft weights are {', '.join(DRAFT_WEIGHTS[:-1])} or {DRAFT_WEIGHTS[-1]}, not "
            f"{draft_weights!r}"
        )
    if "int8" in (weights, draft_weights) and mesh.size > 1:
        raise UserError("int8 weights are read on one device: use --mesh 1,1,1")
    form = _backbone_form(config, dtype, mesh, weights)
    return replace(form, draft_weights=draft_weights or "")


def _backbone_form(
    config: LlamaConfig, dtype: Any, mesh: Mesh, weights: str | None
) -> Storage:
    """`choose_storage` without what is asked for draft heads."""
    kept = "" if weights is None or weights == jnp.dtype(dtype).name else weights
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", *NAMES):
        raise UserError(f"{VARIABLE} is {' or '.join(NAMES)}, not {asked!r}")
    on_cpu = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    if (
        asked == "plain"
        or not on_cpu
        or jnp.dtype(dtype).name not in ("float32", "bfloat16")
    ):
        return Storage(0, kept)
    native = library()
    if native is None:
        if asked == "native":
            raise UserError(
                f"{VARIABLE}=native needs a C++ compiler (c++, or what CXX names) that can build "
                "the kernels for this processor"
            )
        return Storage(0, kept)
    panels = Storage(native.panel, kept)
    if asked == "native" or _faster(config, dtype, panels, native.path) == "native":
        return panels
    return Storage(0, kept)


def _faster(config: LlamaConfig, dtype: Any, panels: Storage, kernels: str) -> str:
    """The name of the faster form, from the user's cache or measured now."""
    shapes, weights = layer_shapes(config), panels.weights
    marks = (Path(kernels).name, config.n_layers, shapes, str(dtype), weights)
    kept = Kept("products", *marks)
    if (form := kept.read().get("form")) in NAMES:
        return str(form)
    forms = {"plain": Storage(0, weights), "native": panels}
    with announced("measuring which products are fastest on this device, once"):
        seconds = product_seconds(config, dtype, forms)
    form = decided(seconds)
    kept.write({"form": form, "rows": [ONE, TREE], "seconds": seconds, "kernels": shapes})
    return form


def decided(seconds: dict[str, list[float]]) -> str:
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


def product_seconds(
    config: LlamaConfig, dtype: Any, forms: dict[str, Storage]
) -> dict[str, list[float]]:
    """Least seconds of all products of the layers, for ONE and TREE rows, forms in turn.

    The least, not the median: what else runs on the machine only ever adds to it, and the choice
    is kept.
    """
    shapes = layer_shapes(config)
    itemsize = jnp.dtype(dtype).itemsize
    n_layers = min(
        config.n_layers, max(1, BYTES // sum(i * o * itemsize for i, o in shapes))
    )

    def run(layers: list[list[Any]], x_RD: jax.Array) -> jax.Array:
        for kernels in layers:
            y = x_RD
            for kernel, (inputs, _) in zip(kernels, shapes):
                y = multiply(y[:, :inputs], kernel, dtype).astype(dtype)
            x_RD = x_RD + y
        return x_RD

    timed = jax.jit(run)
    cases: dict[tuple[str, int], Callable[[], Any]] = {}
    for name, storage in forms.items():
        one = jax.jit(lambda key, storage=storage: _layer(key, shapes, dtype, storage))
        layers = [one(jax.random.key(i)) for i in range(n_layers)]
        for place, rows in enumerate((ONE, TREE)):
            x_RD = jnp.ones((rows, config.d_model), dtype)
            cases[name, place] = partial(timed, layers, x_RD)
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for call in cases.values():
        jax.block_until_ready(call())  # compile
    begun = time.perf_counter()
    while len(times[name, 0]) < ROUNDS or time.perf_counter() - begun < SECONDS:
        for case, call in cases.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[case].append(time.perf_counter() - start)
    return {name: [min(times[name, place]) for place in (0, 1)] for name in forms}


def _layer(
    key: jax.Array, shapes: list[tuple[int, int]], dtype: Any, storage: Storage
) -> list[Any]:
    """Random kernels of one layer in a form."""
    out = []
    for k, (inputs, outputs) in zip(jax.random.split(key, len(shapes)), shapes):
        kernel = jax.random.normal(k, (inputs, outputs), at_least_f32(dtype)) * inputs**-0.5
        out.append(store({"kernel": kernel.astype(dtype)}, storage)["kernel"])
    return out
