"""The shape of a model by name, or from its configuration."""

from dataclasses import replace
from pathlib import Path

from medusa_jax.arch import LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.files.hf import model_shape

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


def find_shape(name: str) -> LlamaConfig:
    """A published shape by name, or that of a `config.json` or its directory.

    Raises:
      UserError: neither; lists the names.
    """
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name)
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").exists():
        raise UserError(
            f"{name!r} is no directory with a config.json and none of the shapes "
            f"{', '.join(SHAPES)}"
        )
    return model_shape(str(folder))
