"""Kernels of our own for XLA on a CPU: optional, and compiled on the machine they run on."""

from medusa_jax.native.blocks import pack_blocks as pack_blocks
from medusa_jax.native.blocks import packs as packs
from medusa_jax.native.blocks import unpacked_rows as unpacked_rows
from medusa_jax.native.layer import Kernel as Kernel
from medusa_jax.native.layer import layer_native as layer_native
from medusa_jax.native.library import Library as Library
from medusa_jax.native.library import library as library
from medusa_jax.native.product import Parts as Parts
from medusa_jax.native.product import in_panels as in_panels
from medusa_jax.native.product import panel_product as panel_product
from medusa_jax.native.product import panel_scales as panel_scales
from medusa_jax.native.rows import norm_native as norm_native
from medusa_jax.native.rows import read_native as read_native
from medusa_jax.native.rows import rotate_native as rotate_native
