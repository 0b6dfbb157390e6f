"""medusa_jax: draft-head speculative decoding for Llama-family models in JAX.

Dimension key, used as suffixes on arrays that cross a function boundary:
  B batch, T query tokens, S cache slots, D model width, F mlp width, V vocabulary,
  N query heads, G key/value heads, H head dim, K draft heads, M tree nodes (root included),
  L path length (at most K + 1), O output tokens.
"""
