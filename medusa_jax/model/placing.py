"""From stored parameters to those that decoding reads, a part at a time.

A part is an entry of a parameter tree, such as {"layers_3": ...}. Reading converts each before it
reads the next (`convert` of the loaders), so that a device never holds more than the model as
it decodes and one layer twice.
"""

from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from medusa_jax.config import LlamaConfig
from medusa_jax.model.llama import Llama, decoding_config, prepare
from medusa_jax.model.product import tile_kernels
from medusa_jax.sharding import param_shardings

Params = dict[str, Any]

_in_tiles = jax.jit(tile_kernels)


def decoder(config: LlamaConfig, dtype: Any, mesh: Mesh) -> Llama:
    """The backbone that reads what `place_part` gives."""
    return Llama(decoding_config(config), dtype, shards=mesh.shape["tensor"], mesh=mesh)


def place_part(config: LlamaConfig, part: Params, dtype: Any, mesh: Mesh) -> Params:
    """A stored part of the backbone, fused and placed; tiled on one CPU device.

    Waits for the device: a part that is still being read from cannot be let go of.
    """
    [(name, inner)] = part.items()
    # All layers are one program, and one name serves the table for all.
    known = "layers_0" if name.startswith("layers_") else name
    out = jax.block_until_ready(_prepared({known: inner}, config, dtype, mesh))
    return {name if entry == known else entry: value for entry, value in out.items()}


def place_head(part: Params, dtype: Any, mesh: Mesh) -> Params:
    """A stored part of the draft heads, in `dtype` already: tiled on one CPU device."""
    return jax.block_until_ready(_in_tiles(part)) if _tiled(dtype, mesh) else part


def _tiled(dtype: Any, mesh: Mesh) -> bool:
    on_cpu = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    return on_cpu and dtype.itemsize > 2  # 16-bit products are not the library's anyway


@partial(jax.jit, static_argnums=(1, 2, 3))
def _prepared(part: Params, config: LlamaConfig, dtype: Any, mesh: Mesh) -> Params:
    out = prepare(part, config, dtype, mesh.shape["tensor"])
    out = jax.lax.with_sharding_constraint(out, param_shardings(mesh, out))
    return tile_kernels(out) if _tiled(dtype, mesh) else out
