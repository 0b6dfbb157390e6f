"""The engine for one CPU: kernels of our own for XLA, compiled on the machine they run on.

`model/seams.py` is its only door and has its protocol.
"""

from medusa_jax.cpu.blocks import prepare as prepare
from medusa_jax.cpu.layer import commit as commit
from medusa_jax.cpu.layer import layer as layer
from medusa_jax.cpu.library import attends as attends
from medusa_jax.cpu.library import library as library
from medusa_jax.cpu.library import mark as mark
from medusa_jax.cpu.library import panel as panel
from medusa_jax.cpu.library import usable as usable
from medusa_jax.cpu.panels import panels as panels
from medusa_jax.cpu.rows import norm as norm
from medusa_jax.cpu.rows import rotate as rotate
