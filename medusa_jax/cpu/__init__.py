"""The native kernels for one CPU: operations for XLA, compiled on the machine they run on.

`kernels/one_cpu.py` calls:

- `panels.py: panels`, `blocks.py: read_blocks`: convert kernels, of floats, of int8 and in the blocks of a GGUF file;
- `layer.py: layer`: a whole layer over few tokens; `commit`: move accepted keys and values;
- `layer.py: norm`, `rotate`: single operations, rounded alike in every program; `best_token`.

`native.py` loads them. The products of kernels in panels are `Panels.product`.
"""
