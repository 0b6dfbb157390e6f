"""Strict loading of a parameter tree from named tensors, onto the mesh or to the host."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from medusa_jax.errors import UserError
from medusa_jax.files.tensor import Tensor, Tensors, cast, part, read_whole
from medusa_jax.model.blocks import Blocks
from medusa_jax.sharding import Params, PyTree, param_shardings, path_string

FLOATS = ("float64", "float32", "float16", "bfloat16")
# Converts an entry of a parameter tree, such as {"layers_3": ...}, after it was read.
Convert = Callable[[Params], Params]
# Parameter path -> (key in the checkpoint, whether it is stored transposed).
Locate = Callable[[str], tuple[str, bool]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Tensors of a checkpoint, and where the parameters of a tree are among them.

    Attributes:
      source: the file or directory, for messages.
      tensors: everything that it holds.
      ignore: keys that may exist and are not read.
    """

    source: str
    tensors: Tensors
    locate: Locate
    ignore: Callable[[str], bool] = lambda key: False

    @property
    def files(self) -> set[str]:
        """The files of its tensors."""
        return {tensor.file for tensor in self.tensors.values()}

    def keys(self, abstract: Params) -> dict[str, tuple[str, bool]]:
        """`locate` for every parameter of a tree of shapes.

        Raises:
          UserError: a missing, unknown, misshaped or non-float key.
        """
        keys = {path: self.locate(path) for path in flatten(abstract)}
        names = {name for name, _ in keys.values()}
        for path, leaf in flatten(abstract).items():
            name, transposed = keys[path]
            shape = tuple(leaf.shape[::-1] if transposed else leaf.shape)
            tensor = self.tensors.get(name)
            if tensor is None:
                raise UserError(
                    f"key {name!r} of shape {list(shape)} is missing from {self.source}"
                )
            if tensor.shape != shape:
                raise UserError(
                    f"key {name!r} in {tensor.file} has shape {list(tensor.shape)}, "
                    f"the configuration asks for {list(shape)}"
                )
            if tensor.dtype not in FLOATS:
                raise UserError(
                    f"key {name!r} in {tensor.file} is stored as {tensor.dtype}; only "
                    f"{', '.join(FLOATS)} are read (is the checkpoint quantised?)"
                )
        for name, tensor in sorted(self.tensors.items(), key=lambda item: item[0]):
            if name not in names and not self.ignore(name):
                raise UserError(
                    f"{tensor.file} has a key that this model has no place for: {name!r} of "
                    f"shape {list(tensor.shape)}"
                )
        return keys

    def arrays(self, abstract: Params) -> dict[str, np.ndarray]:
        """Read the parameters of a tree of shapes to the host by path, in their stored type.

        Raises:
          UserError: as for `keys`.
        """
        arrays = {}
        for path, (key, transposed) in self.keys(abstract).items():
            array = read_whole(self.tensors[key])
            arrays[path] = array.T if transposed else array
        return arrays

    def load(
        self,
        abstract: Params,
        mesh: Mesh,
        dtype: DTypeLike,
        convert: Convert | None = None,
        in_blocks: bool = False,
    ) -> Params:
        """Read a parameter tree; each device gets only its slices.

        Args:
          abstract: tree of shapes (from `jax.eval_shape`).
          dtype: type of the parameters on the devices.
          convert: converts each entry of the tree, such as a layer, before the next is read.
          in_blocks: matrices in blocks are not read: `convert` gets `Blocks`.

        Raises:
          UserError: as for `keys`.
        """
        keys = self.keys(abstract)

        def read(
            key_path: KeyPath, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
        ) -> jax.Array | Blocks:
            name, transposed = keys[path_string(key_path)]
            tensor, shape = self.tensors[name], tuple(leaf.shape)
            blocks = tensor.blocks if in_blocks and len(shape) == 2 else None
            if blocks is not None and blocks.exact:
                return blocks
            return _place(tensor, shape, transposed, sharding, np.dtype(dtype))

        shardings = param_shardings(mesh, abstract)
        placed: Params = {}
        for name in abstract:
            trees = ({name: abstract[name]}, {name: shardings[name]})
            # Keeps no reference, so that the unconverted entry is freed.
            placed |= (convert or dict)(jax.tree_util.tree_map_with_path(read, *trees))
        return placed


def _place(
    tensor: Tensor,
    shape: tuple[int, ...],
    transposed: bool,
    sharding: jax.sharding.Sharding,
    dtype: np.dtype,
) -> jax.Array:
    """Place a tensor on the devices; the host holds one slice at a time."""
    owners: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        spans = tuple(s.indices(n)[:2] for s, n in zip(index, shape))
        owners.setdefault(spans, []).append(device)
    placed: list[jax.Array] = []
    for spans, devices in owners.items():
        # Wait until the previous slice is on its device, so that the host holds one at a time.
        jax.block_until_ready(placed)
        file_spans = spans[::-1] if transposed else spans
        block = part(tensor, tuple(slice(*span) for span in file_spans))
        block = block.T if transposed else block
        if block.dtype == dtype or block.dtype.itemsize < dtype.itemsize:
            block = np.ascontiguousarray(block, dtype)
        else:
            block = cast(block, dtype, f"tensor {tensor.name!r} in {tensor.file}")
        placed += [jax.device_put(block, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def flatten(tree: PyTree) -> Params:
    """A parameter tree as {"layers_0/mlp/up_proj/kernel": leaf}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_string(key_path): leaf for key_path, leaf in leaves}
