"""The engine for one CPU: kernels of our own for XLA, compiled on the machine they run on.

`kernels/one_cpu.py` calls:

- `usable`, `attends`: whether it computes in a type, and with heads of a size;
- `begin_loading`: begins to compile it, or to load it;
- `panel`, `panels`, `prepare`: convert kernels, of floats, of int8 and in the blocks of a GGUF file;
- `layer`: a whole layer over few tokens; `commit`: move accepted keys and values;
- `norm`, `rotate`: single operations, rounded alike in every program; `best_token`;
- `mark`: names the compiled kernels in measurements.

Running programs can call Python (`host_calls.py`), if `asks`: `decoding/guided.py`. The products of kernels in panels are `Stored.product`.
"""

from medusa_jax.cpu.blocks import prepare as prepare
from medusa_jax.cpu.layer import best_token as best_token
from medusa_jax.cpu.layer import commit as commit
from medusa_jax.cpu.layer import layer as layer
from medusa_jax.cpu.layer import norm as norm
from medusa_jax.cpu.layer import rotate as rotate
from medusa_jax.cpu.panels import panels as panels
from medusa_jax.native import asks as asks
from medusa_jax.native import attends as attends
from medusa_jax.native import begin_loading as begin_loading
from medusa_jax.native import library as library
from medusa_jax.native import mark as mark
from medusa_jax.native import panel as panel
from medusa_jax.native import usable as usable
