"""Which form of stored kernels is fastest here: measured once for each machine and model shape.

A product of few rows takes up to twice as long in one form as in another, depending on the processor,
its caches, its memory and the shapes. Plain decoding reads the same kernels as the tree does, so the form
that is fastest for one row is used, and the rows of a tree decide only if that is nearly a draw.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from medusa_jax.config import STORED, LlamaConfig
from medusa_jax.cpu.library import library, mark
from medusa_jax.errors import UserError
from medusa_jax.measured import PRODUCTS, DeviceCache, in_rounds, within
from medusa_jax.model.stored import Kernel, Storage, multiply, store

VARIABLE = "MEDUSA_JAX_PRODUCTS"
NAMES = ("plain", "native")
# Rows of a product in plain decoding, and with a small tree.
ONE, TREE = 1, 8
# Faster by less than this is a draw for one row; the tree's rows decide.
DRAW = 1.05
# Bytes of the layers that are timed, or all layers: kernels that fit a cache must be timed in it.
BYTES = 2**28
# Most rounds of timing.
ROUNDS = 32


def usable(dtype: DTypeLike) -> bool:
    """Whether the kernels compute in this type here, and `MEDUSA_JAX_PRODUCTS` does not refuse them.

    Raises:
      UserError: an unknown value of the variable, or "native" where they cannot be compiled.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", *NAMES):
        raise UserError(f"{VARIABLE} is {' or '.join(NAMES)}, not {asked!r}")
    if asked == "plain" or jnp.dtype(dtype).name not in ("float32", "bfloat16"):
        return False
    if library() is None and asked == "native":
        raise UserError(
            f"{VARIABLE}=native needs a C++ compiler (c++, or what CXX names) that can build "
            "the kernels for this processor"
        )
    return library() is not None


def choose(config: LlamaConfig, dtype: DTypeLike, plain: Storage) -> Storage:
    """`Engine.choose`: by `MEDUSA_JAX_PRODUCTS`, else by a measurement, which is kept."""
    native = library()
    assert native is not None
    panels = replace(plain, panel=native.panel)
    if plain.weights == STORED or os.environ.get(VARIABLE) == "native":
        return panels
    forms = dict(zip(NAMES, (plain, panels)))
    marks = (config.n_layers, layer_shapes(config), str(dtype), plain.weights)
    kept = DeviceCache("products", mark(), *marks)
    if (form := kept.read().get("form")) not in NAMES:
        rounds = time_products(config, dtype, (plain, panels))
        form = fastest(within(PRODUCTS, "which products are fastest", rounds))
        kept.write({"form": form})
    return forms[form]


def fastest(rounds: Sequence[Sequence[float]]) -> str:
    """The form that is fastest for one row, or within `DRAW` the one that is for a tree's rows.

    The minimum counts, not the median: other work on the machine only adds time, and the choice is kept.
    Native products, which were faster wherever they were measured, are chosen if there was no time.

    Args:
      rounds: of `time_products` with the forms of `NAMES`.
    """
    if not rounds:
        return "native"
    one, tree = np.min(rounds, axis=0).reshape(len(NAMES), 2).T
    return NAMES[np.argmin(tree if max(one) <= DRAW * min(one) else one)]


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
    config: LlamaConfig, dtype: DTypeLike, forms: Sequence[Storage]
) -> Iterator[list[float]]:
    """Seconds of the products of all layers: in each round every form, for one row and for a tree's."""
    shapes = tuple(layer_shapes(config))
    kernels = [np.full(shape, shape[0] ** -0.5, dtype) for shape in shapes]
    n_layers = min(config.n_layers, max(1, BYTES // sum(k.nbytes for k in kernels)))
    place = jax.jit(store, static_argnums=1)
    products = jax.jit(_products, static_argnums=(2, 3))

    def layer(form: Storage) -> list[Kernel]:
        placed = place({str(i): {"kernel": k} for i, k in enumerate(kernels)}, form)
        return [part["kernel"] for part in placed.values()]

    def seconds(layers: list[list[Kernel]], rows: int) -> float:
        start = time.perf_counter()
        x_RD = np.ones((rows, config.d_model), dtype)
        jax.block_until_ready(products(layers, x_RD, dtype, shapes))
        return time.perf_counter() - start

    stacks = [[layer(form) for _ in range(n_layers)] for form in forms]
    runs = [partial(seconds, layers, rows) for layers in stacks for rows in (ONE, TREE)]
    rounds = in_rounds(runs, 1 + ROUNDS)
    next(rounds)  # compiles
    yield from rounds


def _products(
    layers: list[list[Kernel]],
    x_RD: jax.Array,
    dtype: DTypeLike,
    shapes: tuple[tuple[int, int], ...],
) -> jax.Array:
    """The products of all layers in sequence; each reads the first columns of the last result."""

    @jax.jit
    def layer(kernels: list[Kernel], x_RD: jax.Array) -> jax.Array:
        y = x_RD
        for kernel, (inputs, _) in zip(kernels, shapes):
            y = multiply(y[:, :inputs], kernel, dtype).astype(dtype)
        return x_RD + y

    for kernels in layers:
        x_RD = layer(kernels, x_RD)
    return x_RD
