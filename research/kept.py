"""What a backward pass keeps, read from the program of its forward pass.

`jax.vjp` lists what it keeps. XLA stores less: what is elementwise in stored arrays, or a rearrangement of
them, is computed again where it is read. Stored are

- results of products, gathers, reductions and loops, in the narrowest type that they are converted to;
- sums of two arrays of which neither is computed from the other: a residual stream, the next layer's input;
- concatenations, and no others that are a part of them (Hydra's heads read prefixes of the longest).

So of a residual block x + SiLU(x W + b) these are x W and, if another layer reads it, the sum; of a decoder
layer queries, keys, values, what attention returns, gate and up product, and the two sums; masks of dropout
are drawn again. What `jax.checkpoint` computes again is not among what `jax.vjp` lists.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from medusa_jax.sharding import PyTree

_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_STORED = {"dot_general", "gather", "scan", "while", "cond", "sort", "top_k", "concatenate"}
_SUMS = {"add", "sub", "add_any"}


@dataclasses.dataclass(eq=False)
class Stored:
    """An array that is stored whole.

    Attributes:
      parts: the stored arrays that a concatenation consists of.
    """

    size: int
    itemsize: int
    parts: "Sources" = frozenset()


# The stored arrays that an array can be computed from without further products.
Sources = frozenset[Stored]
_NONE: Sources = frozenset()


def kept_bytes(
    f: Callable[..., PyTree], params: PyTree, x: jax.ShapeDtypeStruct, rest: PyTree
) -> int:
    """Bytes that the backward pass of f(params, x, rest) keeps: x, but not `params` and `rest`.

    Args:
      rest: has no gradient. All arguments may be shapes.
    """
    traced = jax.make_jaxpr(lambda p, x, rest: jax.vjp(lambda *a: f(*a, rest), p, x)[1])(
        params, x, rest
    )
    given: list[Sources] = [_NONE for _ in traced.in_avals]
    given[len(jax.tree.leaves(params))] = _stored(x)
    stored = _NONE.union(*_sources(traced.jaxpr, given))
    parts = _NONE.union(*(a.parts for a in stored))
    return sum(a.size * a.itemsize for a in stored if not (a.parts and a in parts))


def _sources(jaxpr: Jaxpr, arguments: Sequence[Sources]) -> list[Sources]:
    """The sources of the results of a program, given those of its arguments."""
    known = dict(zip(jaxpr.invars, arguments, strict=True))

    def of(variable: Any) -> Sources:
        return _NONE if isinstance(variable, Literal) else known.get(variable, _NONE)

    for eqn in jaxpr.eqns:
        name, read = eqn.primitive.name, [of(v) for v in eqn.invars]
        made: list[Any] = [v.aval for v in eqn.outvars]
        union = _NONE.union(*read)
        called = next((eqn.params[key] for key in _CALLED if key in eqn.params), None)
        if name in _STORED or name.startswith("reduce"):
            results = [_stored(x, union if name == "concatenate" else _NONE) for x in made]
        elif called is not None:
            results = _sources(getattr(called, "jaxpr", called), read)
        elif name in _SUMS and _independent(read[0], read[1], math.prod(made[0].shape)):
            results = [_stored(made[0])]
        else:
            if name == "convert_element_type":
                _narrow(union, eqn.invars[0].aval, made[0])
            results = [union] * len(made)
        known |= dict(zip(eqn.outvars, results, strict=True))
    return [of(v) for v in jaxpr.outvars]


def _stored(x: Any, parts: Sources = frozenset()) -> Sources:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return _NONE
    return frozenset([Stored(math.prod(x.shape), x.dtype.itemsize, parts)])


def _independent(a: Sources, b: Sources, size: int) -> bool:
    """Whether both terms of a sum are computed from stored arrays of its size, and neither from the other's."""
    large = all(sum(x.size for x in term) >= size for term in (a, b))
    return large and not a <= b and not b <= a


def _narrow(sources: Sources, before: Any, after: Any) -> None:
    """Store an array, if it is the only source, in the floating-point type that it is converted to."""
    if all(jnp.issubdtype(x.dtype, jnp.floating) for x in (before, after)):
        for x in sources if len(sources) == 1 else ():
            x.itemsize = min(x.itemsize, after.dtype.itemsize)
