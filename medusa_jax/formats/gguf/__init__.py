"""GGUF files, llama.cpp's format, as model directories in Hugging Face form."""

from medusa_jax.formats.gguf.convert import converted

__all__ = ["converted"]
