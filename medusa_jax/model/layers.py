"""What every layer is made of: linear maps and the norm."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.model.lora import add_adapter
from medusa_jax.model.product import at_least_f32, product, tiled_product
from medusa_jax.model.quantise import quantised_product


class Linear(nn.Module):
    """y = x W (+ b), kernel [in, out]; computed in `dtype`, accumulated in float32 or wider.

    Where the variables say so, W is quantised (`model/quantise.py`) or in tiles
    (`model/product.py`), and x passes through a low-rank adapter as well (`model/lora.py`).
    """

    features: int
    use_bias: bool = False
    dtype: Any = jnp.float32
    # 0: a plain kernel. n: outputs grouped per tensor shard, kernel [in, n, features // n].
    shards: int = 0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = (
            (self.shards, self.features // self.shards) if self.shards else (self.features,)
        )
        x = x.astype(self.dtype)
        if self.has_variable("params", "codes"):
            stored: list[Any] = [
                self.get_variable("params", name) for name in ("codes", "scales")
            ]
            y = quantised_product(x, *stored)
        elif self.has_variable("params", "tiles"):
            tiles: Any = self.get_variable("params", "tiles")
            y = tiled_product(x, tiles.astype(self.dtype)).reshape(*x.shape[:-1], *width)
        else:
            init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0)
            kernel = self.param("kernel", init, (x.shape[-1], *width)).astype(self.dtype)
            y = product(x, kernel)
        y = add_adapter(self, x, y)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, width)
            y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
        return y.astype(self.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * scale, the mean square taken in float32 or wider."""

    eps: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(at_least_f32(self.dtype))
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return jnp.broadcast_to(scale.astype(self.dtype), x.shape) * wide.astype(self.dtype)
