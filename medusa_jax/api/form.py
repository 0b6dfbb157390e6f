"""The types of a model, and the reading of its weights in them."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from medusa_jax.arch import DTYPES, STORED
from medusa_jax.console import inform
from medusa_jax.devices.platforms import before_ampere
from medusa_jax.errors import UserError, one_of
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.tensors import stands_for_gguf
from medusa_jax.kernels.choose import choose_kernels
from medusa_jax.mapped import made_once
from medusa_jax.model.convert import choose_storage, place_part
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import Params


@dataclass(frozen=True)
class Form:
    """The types of a model.

    Attributes:
      read_as: type that files are read in, before kernels are converted to `storage`.
      dtype: type to compute in.
      storage: the form that the weights of products are stored in.
      kernels: the operations that differ by platform.
    """

    read_as: str
    dtype: np.dtype
    storage: Storage
    kernels: Kernels


def default_dtype() -> str:
    """float32 on a CPU (its bfloat16 products are slow), bfloat16 elsewhere."""
    if before_ampere():
        inform(
            "note: this GPU unpacks bfloat16 weights in every step: dtype float16 is faster"
        )
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def choose_form(
    base: BaseFiles,
    mesh: Mesh,
    dtype: str,
    weights: str | None,
    draft_weights: str | None,
    activations: int,
    kernels: Kernels | None,
) -> Form:
    """The types to read, compute and store in.

    Args:
      base: the model's files.
      dtype, weights, draft_weights, activations: as for `load`.
      kernels: None: the fastest for these devices and types.

    Raises:
      UserError: an unknown type, or types that do not go together on these devices.
    """
    one_of("dtype", dtype, DTYPES)
    if dtype == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise UserError(
            'dtype float64 needs 64-bit types: call jax.config.update("jax_enable_x64", True) '
            "before anything is loaded, or set JAX_ENABLE_X64=1"
        )
    number, head_dim = jnp.dtype(dtype), base.config.head_dim
    operations = kernels or choose_kernels(mesh, number, head_dim)
    weights = stored_if_possible(weights, base.source, dtype, operations)
    storage = choose_storage(operations, number, mesh, weights, draft_weights, activations)
    if storage.panel and dtype == "bfloat16":
        # The native kernels compute in float32, which is also faster in XLA.
        number = jnp.dtype("float32")
        operations = kernels or choose_kernels(mesh, number, head_dim)
        storage = replace(storage, weights=storage.weights or dtype)
    elif draft_weights == "float32" and number.itemsize < 4:
        raise UserError(f"draft weights in float32 need dtype float32, not {dtype}")
    return Form(dtype, number, storage, operations)


def product_forms(base: BaseFiles, dtype: str, weights: str | None) -> set[str]:
    """The weights that the native kernels would multiply by: a GGUF file's types of blocks, or one type."""
    if weights in (None, STORED) and stands_for_gguf(base.source) and dtype == "float32":
        kernels = [t.blocks for t in base.tensors.values() if len(t.shape) == 2]
        return {blocks.kind for blocks in kernels if blocks}
    return {weights or dtype}


def stored_if_possible(
    weights: str | None, directory: str, dtype: str, kernels: Kernels
) -> str | None:
    """How to store weights: by default the blocks of a GGUF file unchanged, if possible.

    Raises:
      UserError: "stored" was requested for a file without blocks or another type than float32.
    """
    blocks = stands_for_gguf(directory)
    if weights == STORED and not (blocks and dtype == "float32"):
        requirement = "dtype float32" if blocks else "a GGUF file"
        raise UserError(f"--weights stored needs {requirement}")
    if weights not in (None, STORED) or not blocks or dtype != "float32":
        return weights
    if kernels.panel:
        return STORED
    inform(
        "the file's weights are unpacked: reading them as stored needs one CPU and a C++ compiler"
    )
    return None


def read_backbone(base: BaseFiles, form: Form, mesh: Mesh) -> Params:
    """Read the backbone layer by layer; each is converted to decoding form before the next."""

    def place(part: Params) -> Params:
        return place_part(base.config, part, form.dtype, mesh, form.storage, form.kernels)

    in_blocks = form.storage.weights == STORED
    read_all = partial(base.parameters, mesh, form.read_as, place, in_blocks)
    if not form.storage.panel:
        return read_all()
    marks = base.config, form, form.kernels.mark
    return made_once("weights", base.files, marks, read_all)
