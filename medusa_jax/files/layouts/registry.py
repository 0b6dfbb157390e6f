"""The layouts of draft heads: the package's table, and those of other packages.

Imports no layout before it is needed, so that `--help` can show the table at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.files.layouts import jax_limits, limits
from medusa_jax.files.layouts.limits import Limits

if TYPE_CHECKING:
    from medusa_jax.files.layouts.layout import Layout

# Entry points of other packages with a subclass of `Layout`; the name is its value of --to.
GROUP = "medusa_jax.layouts"
PACKAGE = "medusa_jax.files.layouts"


class Target(NamedTuple):
    """A value of `convert --to`.

    Attributes:
      purpose: who reads it.
      layouts: module and class in this folder -> the heads that it can hold, one for each family.
    """

    purpose: str
    layouts: Mapping[str, Limits]


_EAGLE3 = Limits(("eagle3",), draft_vocab=True, why_not=limits.eagle3)
_EAGLE3_IN_SPECULATORS = replace(_EAGLE3, why_not=limits.eagle3_in_speculators)
_TPU, _SGLANG = jax_limits.TPU, jax_limits.SGLANG
TARGETS = {
    "native": Target(
        "this project's format, bound to the model by its fingerprint",
        {"native_files:NativeFiles": Limits(None, draft_vocab=True)},
    ),
    "vllm": Target(
        "vLLM: Medusa (any version that has it), EAGLE-1; EAGLE-3 as `speculators`",
        {
            "medusa_files:MedusaForVLLM": Limits(("medusa",), draft_vocab=True),
            "eagle_files:EagleForVLLM": Limits(("eagle",), why_not=limits.eagle_for_vllm),
            "eagle3_files:SpeculatorsEagle3": _EAGLE3_IN_SPECULATORS,
        },
    ),
    "sglang": Target(
        "SGLang: EAGLE-1; EAGLE-3 as `eagle3`",
        {
            "eagle_files:EagleForSGLang": Limits(
                ("eagle",), why_not=limits.eagle_for_sglang
            ),
            "eagle3_files:Eagle3Files": _EAGLE3,
        },
    ),
    "tpu_inference": Target(
        "tpu-inference (vLLM on TPUs): EAGLE-3, DFlash",
        {
            "jax_files:Eagle3ForTpu": Limits(
                ("eagle3",), True, partial(jax_limits.eagle3, _TPU)
            ),
            "jax_files:DFlashForTpu": Limits(
                ("dflash",), why_not=partial(jax_limits.blocks, _TPU)
            ),
        },
    ),
    "sglang_jax": Target(
        "sglang-jax: EAGLE-3, DFlash, DSpark",
        {
            "jax_files:Eagle3ForSglangJax": Limits(
                ("eagle3",), True, partial(jax_limits.eagle3, _SGLANG)
            ),
            "jax_files:BlocksForSglangJax": Limits(
                ("dflash", "dspark"), why_not=partial(jax_limits.blocks, _SGLANG)
            ),
        },
    ),
    "tgi": Target(
        "TGI, and vLLM from 0.28 on", {"medusa_files:MedusaFiles": Limits(("medusa",))}
    ),
    "hydra": Target(
        "Hydra's own code",
        {"hydra_files:HydraFiles": Limits(("hydra", "hydrapp"), why_not=limits.hydra)},
    ),
    "eagle": Target(
        "EAGLE's own code",
        {"eagle_files:EagleFiles": Limits(("eagle",), why_not=limits.eagle)},
    ),
    "eagle3": Target(
        "EAGLE-3 in SGLang, vLLM and EAGLE's own code",
        {"eagle3_files:Eagle3Files": _EAGLE3},
    ),
    "dflash": Target(
        "DFlash and DSpark in vLLM, SGLang and the code of z-lab, SpecForge and DeepSpec",
        {"dflash_files:DFlashFiles": Limits(("dflash", "dspark"), why_not=limits.dflash)},
    ),
    "speculators": Target(
        "EAGLE-3, DFlash and DSpark in vLLM and speculators",
        {
            "eagle3_files:SpeculatorsEagle3": _EAGLE3_IN_SPECULATORS,
            "dflash_files:SpeculatorsDFlash": Limits(
                ("dflash", "dspark"), True, limits.dflash_in_speculators
            ),
        },
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


def layouts_of(target: str) -> dict[str, Limits]:
    """The layouts that a value of --to names, as "module:Class", and the heads that they can hold.

    Raises:
      UserError: an unknown name, or a class that cannot be imported.
    """
    if target in TARGETS:
        rows = TARGETS[target].layouts
        return {f"{PACKAGE}.{path}": row for path, row in rows.items()}
    plugins = _entry_points()
    if target in plugins or ":" in target:
        path = plugins[target].value if target in plugins else target
        return {path: _layout(path).limits}
    names = [*TARGETS, *plugins]
    raise UserError(
        f"--to is one of {', '.join(names)}, or module:Class, not {target!r}"
        f"{did_you_mean(target, names)}"
    )


def limits_of(target: str, drafter: str) -> Limits | None:
    """The limits of the layout for heads of a kind; None if the target has no place for them."""
    rows = layouts_of(target).values()
    return next((row for row in rows if row.holds(drafter)), None)


def layout_of(target: str, drafter: str) -> Layout | None:
    """The layout for heads of a kind; None if the target has no place for them."""
    rows = layouts_of(target).items()
    return next((_layout(path) for path, row in rows if row.holds(drafter)), None)


def targets_of(drafter: str) -> dict[str, Limits]:
    """Values of --to in the package's table that have a place for heads of a kind."""
    rows = {target: limits_of(target, drafter) for target in TARGETS}
    return {target: row for target, row in rows.items() if row is not None}


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
