"""What heads are estimated to forget, against the loss itself."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from medusa_jax.learning.moments import forgotten, joined, no_moments, observe
from medusa_jax.model.layers import Linear

I, R, O = 5, 2, 3


class Pair(nn.Module):
    """Two products; `jax.checkpoint` as the losses of deep drafters have it."""

    def setup(self):
        self.up, self.down = Linear(O), Linear(O)

    def __call__(self, x_NI):
        return self.down(jax.checkpoint(lambda x: jnp.tanh(self.up(x)))(x_NI))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("n", [1, 4])
def test_one_row_is_exact_and_rows_outside_the_loss_do_not_count(n):
    """With one row in the loss, the estimate is half the square of the first-order change."""
    rng = np.random.default_rng(0)
    x_NI, weight_O = rng.standard_normal((n, I)), rng.standard_normal(O)
    shapes, pair = {"up": (I, O), "down": (O, O)}, Pair()
    params = {name: {"kernel": rng.standard_normal(s)} for name, s in shapes.items()}
    a = {"up": rng.standard_normal((I, R)), "down": rng.standard_normal((O, R))}
    factors = {k: {"a": a[k], "b": rng.standard_normal((R, O))} for k in shapes}

    def loss(params):
        return pair.apply({"params": params}, x_NI)[0] @ weight_O

    def observed(moments):
        with nn.intercept_methods(observe):
            return loss(joined(params, moments))

    moments = jax.grad(observed)(no_moments(shapes))
    assert observed(no_moments(shapes)) == loss(params)
    expected = 0.0
    for name, gradient in jax.grad(loss)(params).items():
        assert float(moments[name]["moments"]["rows"]) == 1
        change_IO = 0.5 * factors[name]["a"] @ factors[name]["b"]
        expected += 0.5 * np.sum(np.array(gradient["kernel"]) * change_IO) ** 2
    found = forgotten(factors, moments, 1, 0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
