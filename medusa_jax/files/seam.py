"""The content of a file chooses the module that reads it, which is imported then."""

import importlib
from typing import Any


def import_format(module: str) -> Any:
    """Import a module of the package, such as "files.torch_files"."""
    return importlib.import_module(f"medusa_jax.{module}")
