"""The layouts of draft heads: the package's table, and those of other packages.

Imports no layout before it is needed, so that `--help` can show the table at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from medusa_jax.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from medusa_jax.files.layouts.layout import Layout

# Entry points of other packages with a subclass of `Layout`; the name is its value of --to.
GROUP = "medusa_jax.layouts"
PACKAGE = "medusa_jax.files.layouts"


class Target(NamedTuple):
    """A value of `convert --to`.

    Attributes:
      purpose: who reads it.
      layouts: kind of heads, "*" for all -> module and class in this folder.
    """

    purpose: str
    layouts: Mapping[str, str]


_BLOCKS = ("dflash", "dspark")
TARGETS = {
    "native": Target(
        "this project's format, bound to the model by its fingerprint",
        {"*": "native_files:NativeFiles"},
    ),
    "vllm": Target(
        "vLLM: Medusa (any version that has it), EAGLE-1; EAGLE-3 as `speculators`",
        {
            "medusa": "medusa_files:MedusaForVLLM",
            "eagle": "eagle_files:EagleForVLLM",
            "eagle3": "eagle3_files:SpeculatorsEagle3",
        },
    ),
    "sglang": Target(
        "SGLang: EAGLE-1; EAGLE-3 as `eagle3`",
        {"eagle": "eagle_files:EagleForSGLang", "eagle3": "eagle3_files:Eagle3Files"},
    ),
    "tpu_inference": Target(
        "tpu-inference (vLLM on TPUs): EAGLE-3, DFlash",
        {"eagle3": "jax_files:Eagle3ForTpu", "dflash": "jax_files:DFlashForTpu"},
    ),
    "sglang_jax": Target(
        "sglang-jax: EAGLE-3, DFlash, DSpark",
        {"eagle3": "jax_files:Eagle3ForSglangJax"}
        | dict.fromkeys(_BLOCKS, "jax_files:BlocksForSglangJax"),
    ),
    "tgi": Target("TGI, and vLLM from 0.28 on", {"medusa": "medusa_files:MedusaFiles"}),
    "hydra": Target(
        "Hydra's own code", dict.fromkeys(("hydra", "hydrapp"), "hydra_files:HydraFiles")
    ),
    "eagle": Target("EAGLE's own code", {"eagle": "eagle_files:EagleFiles"}),
    "eagle3": Target(
        "EAGLE-3 in SGLang, vLLM and EAGLE's own code",
        {"eagle3": "eagle3_files:Eagle3Files"},
    ),
    "dflash": Target(
        "DFlash and DSpark in vLLM, SGLang and the code of z-lab, SpecForge and DeepSpec",
        dict.fromkeys(_BLOCKS, "dflash_files:DFlashFiles"),
    ),
    "speculators": Target(
        "EAGLE-3, DFlash and DSpark in vLLM and speculators",
        {"eagle3": "eagle3_files:SpeculatorsEagle3"}
        | dict.fromkeys(_BLOCKS, "dflash_files:SpeculatorsDFlash"),
    ),
}
# Layouts in the order in which a file is compared with them: EAGLE-3 files of speculators also have EAGLE-1's keys.
READERS = (
    "hydra_files:HydraFiles",
    "dflash_files:DFlashFiles",
    "eagle3_files:Eagle3Files",
    "eagle_files:EagleFiles",
    "medusa_files:MedusaForVLLM",
    "medusa_files:MedusaFiles",
)


def readers() -> Iterator[Layout]:
    """All layouts that may be read, those of other packages last."""
    for path in READERS:
        yield _layout(f"{PACKAGE}.{path}")
    for entry in _entry_points().values():
        yield _layout(entry.value)


def layouts_of(target: str) -> dict[str, str]:
    """The layouts that a value of --to names, as "module:Class", by the kinds of heads that they can hold.

    Raises:
      UserError: an unknown name, or a class that cannot be imported.
    """
    if target in TARGETS:
        rows = TARGETS[target].layouts
        return {kind: f"{PACKAGE}.{path}" for kind, path in rows.items()}
    plugins = _entry_points()
    if target in plugins or ":" in target:
        path = plugins[target].value if target in plugins else target
        return dict.fromkeys(_layout(path).drafters, path)
    names = [*TARGETS, *plugins]
    raise UserError(
        f"--to is one of {', '.join(names)}, or module:Class, not {target!r}"
        f"{did_you_mean(target, names)}"
    )


def layout_of(target: str, drafter: str) -> Layout | None:
    """The layout for heads of a kind; None if the target has no place for them."""
    rows = layouts_of(target)
    path = rows.get(drafter) or rows.get("*")
    return _layout(path) if path else None


def targets_of(drafter: str) -> list[str]:
    """Values of --to in the package's table that have a place for heads of a kind."""
    kinds = {drafter, "*"}
    return [name for name, row in TARGETS.items() if kinds & row.layouts.keys()]


def _entry_points() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def _layout(path: str) -> Layout:
    """An instance of the class at "module:Class".

    Raises:
      UserError: there is no such class.
    """
    from medusa_jax.files.layouts.layout import Layout

    module, _, name = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"layout {path} cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Layout)):
        raise UserError(f"layout {path} is no subclass of {Layout.__module__}.Layout")
    return kind()
