"""Linear layers and the RMS norm."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.model.engine import cpu
from medusa_jax.model.lora import add_adapter
from medusa_jax.model.product import at_least_f32
from medusa_jax.model.quantise import quantised_product
from medusa_jax.model.stored import Kernel, Stored, multiply


class Linear(nn.Module):
    """y = x W (+ b), kernel [in, out]; computed in `dtype`, accumulated in float32 or wider.

    Depending on its variables, W is quantised (`model/quantise.py`) or stored in another form
    (`model/stored.py`), and a low-rank adapter is added (`model/lora.py`).
    """

    features: int
    use_bias: bool = False
    dtype: DTypeLike = jnp.float32
    # 0: a plain kernel. n: outputs grouped by tensor shard, kernel [in, n, features // n].
    shards: int = 0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = (
            (self.shards, self.features // self.shards) if self.shards else (self.features,)
        )
        x = x.astype(self.dtype)
        if self.has_variable("params", "codes"):
            codes: jax.Array = self.get_variable("params", "codes")
            scales: jax.Array = self.get_variable("params", "scales")
            y = quantised_product(x, codes, scales)
        else:
            init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0)
            kernel = kernel_of(self, init, (x.shape[-1], *width))
            y = multiply(x, kernel, self.dtype).reshape(*x.shape[:-1], *width)
        y = add_adapter(self, x, y)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, width)
            y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
        return y.astype(self.dtype)


class Embed(nn.Embed):
    """Rows of a table [tokens, width] in any form; in blocks, a row is unpacked when it is looked up."""

    def setup(self) -> None:
        if self.has_variable("params", "embedding"):
            self.embedding = self.get_variable("params", "embedding")
        else:
            super().setup()

    def __call__(self, tokens: jax.Array) -> jax.Array:
        if isinstance(self.embedding, Stored):
            return self.embedding.rows(tokens).astype(self.dtype)
        return super().__call__(tokens)


def kernel_of(
    module: nn.Module, init: nn.initializers.Initializer, shape: tuple[int, ...]
) -> Kernel:
    """The module's `kernel`, in whatever form it is stored; made by `init` if there is none."""
    if module.has_variable("params", "kernel"):
        return module.get_variable("params", "kernel")
    return module.param("kernel", init, shape)


class RMSNorm(nn.Module):
    """x / rms(x) * scale, the mean square in float32 or wider; `native`: by the CPU engine."""

    eps: float
    dtype: DTypeLike = jnp.float32
    native: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        if self.native:
            return cpu().norm(x, scale, self.eps)
        wide = x.astype(at_least_f32(self.dtype))
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return jnp.broadcast_to(scale.astype(self.dtype), x.shape) * wide.astype(self.dtype)
