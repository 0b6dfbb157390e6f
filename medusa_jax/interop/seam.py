"""The seam to `formats/`: the content of a file chooses the module that reads it, which is imported then."""

import importlib
from typing import Any


def import_format(module: str) -> Any:
    """Import a module of `formats/`, such as "torch_files"."""
    return importlib.import_module(f"medusa_jax.formats.{module}")
