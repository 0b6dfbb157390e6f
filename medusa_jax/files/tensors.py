"""Checkpoint files as named, lazily read tensors, and strict loading onto the mesh."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from medusa_jax.errors import UserError
from medusa_jax.files.seam import import_format
from medusa_jax.files.tensor import Tensor, Tensors, cast, part, whole
from medusa_jax.model.blocks import BlockRows
from medusa_jax.sharding import Params, PyTree, param_shardings, path_string
from medusa_jax.whole_files import Json, decode_text, parse_json, replacing, write_text

# In order of preference.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# A link to the GGUF file in the directory that `resolve` makes for it.
GGUF_LINK = "model.gguf"
FLOATS = ("float64", "float32", "float16", "bfloat16")
# Converts an entry of a parameter tree, such as {"layers_3": ...}, after it was read.
Convert = Callable[[Params], Params]


def open_safetensors(path: str) -> Tensors:
    """Open a safetensors file; tensors are read later.

    Raises:
      UserError: the file is missing, truncated or not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    _refuse_pointer(path)
    try:
        handle = safe_open(path, framework="np")
        names = handle.keys()
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from error

    def tensor(name: str) -> Tensor:
        view = handle.get_slice(name)
        kind = _SAFETENSORS_DTYPES.get(view.get_dtype(), view.get_dtype())
        shape = tuple(view.get_shape())
        return Tensor(path, shape, kind, lambda index: view[index], name=name)

    return {name: tensor(name) for name in names}


_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "BOOL": "bool",
    "I8": "int8",
}


def open_checkpoint(directory: str) -> Tensors:
    """Open the weights of a Hugging Face model directory; prefers safetensors to .bin.

    Tensors of a GGUF file (of the directory that `resolve` returns for one) are unpacked as they are read.

    Raises:
      UserError: no weights, a missing or unreadable shard, or a broken index.
    """
    if file := weights_file(directory):
        return (_open_shards if file.endswith(".json") else open_weights)(file)
    if stands_for_gguf(directory):
        file = os.readlink(os.path.join(directory, GGUF_LINK))
        tensors: Tensors = import_format("files.gguf.architecture").open_tensors(file)
        return tensors
    raise UserError(
        f"{directory} holds no weights: looked for model.safetensors, pytorch_model.bin and "
        "the .index.json of either"
    )


def weights_file(directory: str) -> str:
    """The file of a model's weights, or the index of its shards; "" if there is none, or for a GGUF file."""
    names = [n + more for n in WEIGHTS for more in (".index.json", "")]
    paths = [os.path.join(directory, name) for name in names]
    return next((path for path in paths if os.path.isfile(path)), "")


def stands_for_gguf(directory: str) -> bool:
    """Whether a model directory is the one that `resolve` makes for a GGUF file."""
    return os.path.islink(os.path.join(directory, GGUF_LINK))


def open_weights(path: str) -> Tensors:
    """Open a file of weights: safetensors by its suffix, else torch's format.

    Raises:
      UserError: the file is unreadable.
    """
    if path.endswith(".safetensors"):
        return open_safetensors(path)
    _refuse_pointer(path)
    tensors: Tensors = import_format("files.torch_files").open_torch(path)
    return tensors


def _open_shards(index: str) -> Tensors:
    directory = os.path.dirname(index)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map")
    tensors: Tensors = {}
    for shard in sorted(set(map(str, weight_map.values()))):
        path = os.path.join(directory, shard)
        # Reject paths outside the directory.
        if os.path.basename(shard) != shard or not os.path.isfile(path):
            raise UserError(
                f"{index} names the shard {shard!r}, which is not in {directory}"
            )
        stored = open_weights(path)
        if twice := sorted(tensors.keys() & stored.keys()):
            other = tensors[twice[0]].file
            raise UserError(f"key {twice[0]!r} is both in {other} and in {path}")
        tensors |= stored
    if missing := sorted(weight_map.keys() - tensors.keys()):
        raise UserError(f"key {missing[0]!r} is missing from the shards of {index}")
    return tensors


def read_json(path: str) -> Json:
    """Read a JSON object; a UserError names the file."""
    try:
        with open(path, "rb") as f:
            value = parse_json(decode_text(f.read()))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object, not a {type(value).__name__}")
    return value


def optional_json(path: str) -> Json:
    """`read_json`; {} if the file does not exist."""
    return read_json(path) if os.path.isfile(path) else {}


def _refuse_pointer(path: str) -> None:
    """Raise for the small text file that a clone without git-lfs has instead of weights."""
    try:
        with open(path, "rb") as f:
            head = f.read(40)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"{path} is a git-lfs pointer, not the weights: run `git lfs pull`")


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

    def keys(self, abstract: Params) -> dict[str, tuple[str, bool]]:
        """`locate` for every parameter of a tree of shapes.

        Raises:
          UserError: a missing, unknown, misshaped or non-float key.
        """
        keys = {path: self.locate(path) for path in flatten(abstract)}
        known = {name for name, _ in keys.values()}
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
            if name not in known and not self.ignore(name):
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
            array = whole(self.tensors[key])
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
          in_blocks: matrices in blocks are not read: `convert` gets `BlockRows`.

        Raises:
          UserError: as for `keys`.
        """
        keys = self.keys(abstract)

        def read(
            key_path: KeyPath, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
        ) -> jax.Array | BlockRows:
            name, transposed = keys[path_string(key_path)]
            tensor, shape = self.tensors[name], tuple(leaf.shape)
            if in_blocks and tensor.blocks is not None and len(shape) == 2:
                return BlockRows(shape, transposed, tensor.blocks)
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
        jax.block_until_ready(placed)  # the previous slice has left the host
        stored = spans[::-1] if transposed else spans
        block = part(tensor, tuple(slice(*span) for span in stored))
        block = block.T if transposed else block
        if block.dtype == dtype or block.dtype.itemsize < dtype.itemsize:
            block = np.ascontiguousarray(block, dtype)
        else:
            block = cast(block, dtype, f"tensor {tensor.name!r} in {tensor.file}")
        placed += [jax.device_put(block, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def save_safetensors(
    path: str, arrays: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    """Write a safetensors file atomically."""
    from safetensors.numpy import save_file

    contiguous = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    with replacing(path) as new:
        with open(new, "wb") as file:
            mode = os.fstat(file.fileno()).st_mode
        save_file(contiguous, new, metadata)
        os.chmod(new, mode & 0o777)  # safetensors sets owner-only permissions


def save_json(path: str, value: Json) -> None:
    """Write a JSON object atomically, formatted as Hugging Face does."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def flatten(tree: PyTree) -> Params:
    """A parameter tree as {"layers_0/mlp/up_proj/kernel": leaf}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_string(key_path): leaf for key_path, leaf in leaves}
