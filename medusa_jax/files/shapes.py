"""Shapes of published models, for uses without weights."""

from dataclasses import replace

from medusa_jax.arch import LlamaConfig

# Vocabulary, width, layers, heads, key/value heads, head size, MLP width, context.
_LLAMA_3 = LlamaConfig(128256, 4096, 32, 32, 8, 128, 14336, 8192)
SHAPES = {
    "llama-7b": LlamaConfig(32000, 4096, 32, 32, 32, 128, 11008, 2048),
    "llama-13b": LlamaConfig(32000, 5120, 40, 40, 40, 128, 13824, 2048),
    "llama-33b": LlamaConfig(32000, 6656, 60, 52, 52, 128, 17920, 2048),
    "llama3-8b": _LLAMA_3,
    "llama3.1-8b": replace(_LLAMA_3, max_position=131072),
    "llama3.1-70b": LlamaConfig(128256, 8192, 80, 64, 8, 128, 28672, 131072),
}
