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
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.config import DRAFT_WEIGHTS, STORED, WEIGHTS, LlamaConfig
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.measured import PRODUCTS, DeviceCache, in_rounds, within
from medusa_jax.model.stored import Kernel, Storage, multiply, store
from medusa_jax.native import Library, library

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
      draft_weights: that of draft heads, of `DRAFT_WEIGHTS`; None is the default of `Storage`.

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
    same = weights in (None, jnp.dtype(dtype).name)
    plain = Storage(0, "" if same else weights or "", draft_weights or "")
    native = _kernels(dtype, mesh)
    if native is None:
        return plain
    panels = replace(plain, panel=native.panel)
    if weights == STORED or os.environ.get(VARIABLE) == "native":
        return panels
    forms = dict(zip(NAMES, (plain, panels)))
    marks = (config.n_layers, layer_shapes(config), str(dtype), plain.weights)
    kept = DeviceCache("products", Path(native.path).name, *marks)
    if (form := kept.read().get("form")) not in NAMES:
        rounds = time_products(config, dtype, (plain, panels))
        form = fastest(within(PRODUCTS, "which products are fastest", rounds))
        kept.write({"form": form})
    return forms[form]


def reads_blocks(dtype: DTypeLike, mesh: Mesh) -> bool:
    """Whether weights can be read here in the blocks of a GGUF file."""
    return jnp.dtype(dtype) == jnp.float32 and _kernels(dtype, mesh) is not None


def _kernels(dtype: DTypeLike, mesh: Mesh) -> Library | None:
    """The native kernels, if they can be used here."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", *NAMES):
        raise UserError(f"{VARIABLE} is {' or '.join(NAMES)}, not {asked!r}")
    on_cpu = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    if (
        asked == "plain"
        or not on_cpu
        or jnp.dtype(dtype).name not in ("float32", "bfloat16")
    ):
        return None
    native = library()
    if native is None and asked == "native":
        raise UserError(
            f"{VARIABLE}=native needs a C++ compiler (c++, or what CXX names) that can build "
            "the kernels for this processor"
        )
    return native


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
