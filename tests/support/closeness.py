"""How close two results must be: a number of roundings of the largest value compared."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def assert_close(got: Any, want: Any, roundings: float = 64, dtype: Any = None) -> None:
    """Leaf by leaf of two like trees: |got - want| <= roundings * eps * max |want|.

    A sum errs by parts of its largest terms, whatever comes out, and by how many depends on the
    order that a processor's vectors give: an absolute tolerance holds on one machine only.
    What is no floating-point number has to be equal.

    Args:
      roundings: several times what was seen; mistakes are larger by orders of magnitude.
      dtype: the type that was computed in, if it is not the coarser one of the two arrays.

    Raises:
      AssertionError: names the leaf, how far apart it is and what is allowed.
    """
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (got, want)]
    assert shapes[0] == shapes[1], shapes
    leaves = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(leaves, jax.tree.leaves(want)):
        types = [dtype] if dtype else [jnp.asarray(x).dtype for x in (a, b)]
        floats = [t for t in types if jnp.issubdtype(t, jnp.floating)]
        eps = max((float(jnp.finfo(t).eps) for t in floats), default=0.0)
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        size, apart = np.abs(b).max(initial=0), np.abs(a - b).max(initial=0)
        allowed = roundings * eps * size
        assert apart <= allowed, (
            f"{jax.tree_util.keystr(path)}: {apart:.3g} apart, {allowed:.3g} allowed"
            f" at values up to {size:.3g}"
        )
