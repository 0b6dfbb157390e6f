"""The shape of a model by name, or from its configuration."""

from pathlib import Path

from medusa_jax.arch import LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.files.hf import model_shape
from medusa_jax.files.shapes import SHAPES


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
