"""What all drafters share: the best guesses by scores."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_jax.heads import fill

LEAST = fill.TOP_K_PARTS * fill.TOP_K_WIDTH


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@settings(max_examples=15, deadline=None)
@given(
    rows=st.sampled_from([1, 4]),
    columns=st.sampled_from([LEAST, LEAST + 77]),
    n=st.integers(1, 12),
    kinds=st.sampled_from([2, 5, 1_000_000]),
    seed=st.integers(0, 2**31),
)
def test_best_places_are_in_order_and_the_first_of_equal_ones(
    platform, rows, columns, n, kinds, seed
):
    """As a stable sort has them; few kinds of scores: many are equal, some are -inf."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, kinds, (rows, columns)).astype(np.float32)
    scores[scores == 0] = -np.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "platform", lambda: platform)
        found = fill.best_places(jnp.asarray(scores), n)
    assert (
        found.dtype == jnp.int32
    )  # with 64-bit integers too: tokens are carried by a loop
    np.testing.assert_array_equal(found, np.argsort(-scores, kind="stable")[:, :n])
