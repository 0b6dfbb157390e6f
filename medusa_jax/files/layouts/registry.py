"""The layouts of draft heads: the package's table, and those of other packages.

Imports no layout before it is needed, so that `--help` can show the table at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
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
      layouts: module and class in this folder, one for each family of heads.
    """

    purpose: str
    layouts: tuple[str, ...]


TARGETS = {
    "native": Target(
        "this project's format, bound to the model by its fingerprint",
        ("native_files:NativeFiles",),
    ),
    "vllm": Target(
        "vLLM: Medusa (any version that has it), EAGLE-1; EAGLE-3 as `speculators`",
        (
            "medusa_files:MedusaForVLLM",
            "eagle_files:EagleForVLLM",
            "eagle3_files:SpeculatorsEagle3",
        ),
    ),
    "sglang": Target(
        "SGLang: EAGLE-1; EAGLE-3 as `eagle3`",
        ("eagle_files:EagleForSGLang", "eagle3_files:Eagle3Files"),
    ),
    "tgi": Target("TGI, and vLLM from 0.28 on", ("medusa_files:MedusaFiles",)),
    "hydra": Target("Hydra's own code", ("hydra_files:HydraFiles",)),
    "eagle": Target("EAGLE's own code", ("eagle_files:EagleFiles",)),
    "eagle3": Target(
        "EAGLE-3 in SGLang, vLLM and EAGLE's own code", ("eagle3_files:Eagle3Files",)
    ),
    "dflash": Target(
        "DFlash and DSpark in vLLM, SGLang and the code of z-lab, SpecForge and DeepSpec",
        ("dflash_files:DFlashFiles",),
    ),
    "speculators": Target(
        "EAGLE-3, DFlash and DSpark in vLLM and speculators",
        ("eagle3_files:SpeculatorsEagle3", "dflash_files:SpeculatorsDFlash"),
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


def layouts_of(target: str) -> list[Layout]:
    """The layouts that a value of --to names, one for each family of heads.

    Raises:
      UserError: an unknown name, or a class that cannot be imported.
    """
    if target in TARGETS:
        return [_layout(f"{PACKAGE}.{path}") for path in TARGETS[target].layouts]
    others = _entry_points()
    if target in others:
        return [_layout(others[target].value)]
    if ":" in target:
        return [_layout(target)]
    known = [*TARGETS, *others]
    raise UserError(
        f"--to is one of {', '.join(known)}, or module:Class, not {target!r}"
        f"{did_you_mean(target, known)}"
    )


def layout_of(target: str, drafter: str) -> Layout | None:
    """The layout that a value of --to names for heads of a kind; None if it has no place for them."""
    return next((layout for layout in layouts_of(target) if layout.holds(drafter)), None)


def targets_of(drafter: str) -> dict[str, Layout]:
    """Values of --to in the package's table that have a place for heads of a kind."""
    layouts = {target: layout_of(target, drafter) for target in TARGETS}
    return {target: layout for target, layout in layouts.items() if layout is not None}


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
