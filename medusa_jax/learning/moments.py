"""Estimates how much the loss on rehearsed text grows when the draft heads change.

Near the loaded heads the loss of a text grows with the square of a kernel's change D. K-FAC (Martens & Grosse 2015, arXiv
1503.05671; against forgetting: Ritter et al. 2018, arXiv 1805.07810) estimates it from two moments of each kernel:

    loss(W + D) - loss(W)  =  1/2 tr(D^T C D G)        C = E[x x^T]        G = E[d d^T]

x are inputs of the kernel, d gradients of the loss at its outputs. The moments cover all rehearsed texts, at the same cost
per step however many these are; a step's own windows are only a few of them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from medusa_jax.sharding import Params

# Where a kernel's parameters have its moments while they are gathered.
ENTRY = "moments"


def no_moments(shapes: dict[str, tuple[int, int]]) -> Params:
    """Sums over no text, by the path of each kernel [I, O]: of x x^T, of d d^T, and of the rows."""
    flat = {
        f"{path}/{ENTRY}": {
            "inputs_II": jnp.zeros((n_in, n_in)),
            "outputs_OO": jnp.zeros((n_out, n_out)),
            "rows": jnp.zeros(()),
        }
        for path, (n_in, n_out) in shapes.items()
    }
    return unflatten_dict(flat, sep="/")  # type: ignore[no-any-return]


def joined(heads: Params, moments: Params) -> Params:
    """The heads, with an entry `moments` next to each kernel.

    Under `observe`, the loss's gradient by this entry is the moments of its text.
    """
    flat = flatten_dict(heads) | flatten_dict(moments)
    return unflatten_dict(flat)  # type: ignore[no-any-return]


def at_products(entry: str, then: Callable[[Params, jax.Array, jax.Array], Any]) -> Any:
    """Interceptor (`nn.intercept_methods`): a module with this entry returns then(entry, x, y) for its product y of x."""

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        y, module = call(*args, **kwargs), context.module
        if context.method_name != "product" or not module.has_variable("params", entry):
            return y
        return then(module.get_variable("params", entry), args[0], y)

    return intercept


@jax.custom_vjp
def _observed(moments: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return y


def _forward(moments: Params, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return y, x


def _backward(x: jax.Array, d: jax.Array) -> tuple[Params, jax.Array, jax.Array]:
    x_NI, d_NO = (rows.reshape(-1, rows.shape[-1]).astype(jnp.float32) for rows in (x, d))
    counts_N1 = jnp.any(d_NO != 0, axis=1, keepdims=True)  # in the loss
    x_NI = jnp.where(counts_N1, x_NI, 0)
    rows = jnp.sum(counts_N1).astype(jnp.float32)
    moments = {"inputs_II": x_NI.T @ x_NI, "outputs_OO": d_NO.T @ d_NO, "rows": rows}
    return moments, jnp.zeros_like(x), d


_observed.defvjp(_forward, _backward)
observe = at_products(ENTRY, _observed)


def forgotten(factors: Params, moments: Params, tokens: Any, scale: float) -> jax.Array:
    """The estimated increase of the mean loss on rehearsed tokens.

    Args:
      factors: of the kernels' changes, `scale` a_IR b_RO.
      moments: of these kernels.
      tokens: number of tokens in the loss that the moments are of.
    """
    if ENTRY not in moments:
        parts = (
            forgotten(factors[name], inner, tokens, scale)
            for name, inner in moments.items()
        )
        return sum(parts, jnp.zeros(()))
    of, a_IR, b_RO = moments[ENTRY], factors["a"], factors["b"] * scale
    inside_RR = a_IR.T @ of["inputs_II"] @ a_IR
    outside_RR = b_RO @ of["outputs_OO"] @ b_RO.T
    return 0.5 * jnp.sum(inside_RR * outside_RR) / jnp.maximum(of["rows"] * tokens, 1.0)
