"""The native kernels for one CPU: operations for XLA, compiled on the machine they run on.

`kernels/one_cpu.py` calls:

- `panels`, `read_blocks`: convert kernels, of floats, of int8 and in the blocks of a GGUF file;
- `layer`: a whole layer over few tokens; `commit`: move accepted keys and values;
- `norm`, `rotate`: single operations, rounded alike in every program; `best_token`.

`native.py` loads them. The products of kernels in panels are `Panels.product`.
"""

from medusa_jax.cpu.blocks import read_blocks as read_blocks
from medusa_jax.cpu.layer import best_token as best_token
from medusa_jax.cpu.layer import commit as commit
from medusa_jax.cpu.layer import layer as layer
from medusa_jax.cpu.layer import norm as norm
from medusa_jax.cpu.layer import rotate as rotate
from medusa_jax.cpu.panels import panels as panels
