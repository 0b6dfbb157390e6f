"""Checkpoint files as named, lazily read tensors, and the strict way from there to the mesh."""

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from medusa_jax.errors import UserError
from medusa_jax.hosts import on_host
from medusa_jax.interop.tensor import Tensor, Tensors
from medusa_jax.model.block_rows import BlockRows
from medusa_jax.sharding import param_shardings, path_string, replicated
from medusa_jax.whole_files import replacing, write_text

# In a directory that stands for a GGUF file: a link to it.
GGUF_LINK = "model.gguf"
FLOATS = ("float64", "float32", "float16", "bfloat16")


# A part of a parameter tree as it is stored, such as {"layers_3": ...} -> what is kept of it.
Convert = Callable[[dict[str, Any]], dict[str, Any]]


def open_safetensors(path: str) -> Tensors:
    """The tensors of one safetensors file, nothing read yet.

    Raises:
      UserError: the file is missing, truncated or something else altogether.
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
        return Tensor(path, tuple(view.get_shape()), kind, lambda index: view[index])

    return {name: tensor(name) for name in names}


_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "I8": "int8",
}


def open_checkpoint(directory: str) -> Tensors:
    """The tensors of a Hugging Face model directory; safetensors preferred over .bin. Those of a GGUF file
    where the directory is what `resolve` gives for one: they are unpacked as they are read.

    Raises:
      UserError: no weights, a shard that is missing or unreadable, a broken index.
    """
    for name, reader in (
        ("model.safetensors", open_safetensors),
        ("pytorch_model.bin", open_torch_file),
    ):
        index = os.path.join(directory, f"{name}.index.json")
        if os.path.isfile(index):
            return _open_shards(directory, index, reader)
        if os.path.isfile(os.path.join(directory, name)):
            return reader(os.path.join(directory, name))
    if stands_for_gguf(directory):
        from medusa_jax.interop.gguf.architecture import opened

        return opened(os.path.realpath(os.path.join(directory, GGUF_LINK)))
    raise UserError(
        f"{directory} holds no weights: looked for model.safetensors, pytorch_model.bin and "
        "the .index.json of either"
    )


def stands_for_gguf(directory: str) -> bool:
    """Whether a model directory is what `resolve` gives for a GGUF file."""
    return os.path.islink(os.path.join(directory, GGUF_LINK))


def open_weights(path: str) -> Tensors:
    """The tensors of one file of weights, by what it is called: safetensors, else torch's.

    Raises:
      UserError: it cannot be read as that.
    """
    return (open_safetensors if path.endswith(".safetensors") else open_torch_file)(path)


def open_torch_file(path: str) -> Tensors:
    """`open_torch`, with the clear word about git-lfs that `open_safetensors` has too."""
    from medusa_jax.interop.torch_files import open_torch

    _refuse_pointer(path)
    return open_torch(path)


def _open_shards(directory: str, index: str, reader: Callable[[str], Tensors]) -> Tensors:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map")
    tensors: Tensors = {}
    for shard in sorted(set(map(str, weight_map.values()))):
        path = os.path.join(directory, shard)
        # A name that climbs out of the directory is never legitimate.
        if os.path.basename(shard) != shard or not os.path.isfile(path):
            raise UserError(
                f"{index} names the shard {shard!r}, which is not in {directory}"
            )
        part = reader(path)
        if twice := sorted(tensors.keys() & part.keys()):
            other = tensors[twice[0]].file
            raise UserError(f"key {twice[0]!r} is both in {other} and in {path}")
        tensors |= part
    for name, shard in weight_map.items():
        if name not in tensors:
            raise UserError(
                f"key {name!r} is missing from {os.path.join(directory, shard)}"
            )
    return tensors


def read_json(path: str) -> dict[str, Any]:
    """A JSON object from a file, or a UserError that names the file."""
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object, not a {type(value).__name__}")
    return value


def optional_json(path: str) -> dict[str, Any]:
    """`read_json`, {} where there is no such file."""
    return read_json(path) if os.path.isfile(path) else {}


def _refuse_pointer(path: str) -> None:
    """A clone without git-lfs leaves a small text file where the weights should be."""
    try:
        with open(path, "rb") as f:
            head = f.read(40)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"{path} is a git-lfs pointer, not the weights: run `git lfs pull`")


def check_keys(
    abstract: dict[str, Any],
    tensors: Tensors,
    locate: Callable[[str], tuple[str, bool]],
    source: str,
    ignore: Callable[[str], bool] = lambda name: False,
) -> dict[str, tuple[str, bool]]:
    """What `locate` says of every parameter, once all keys are there and none is left over.

    Args: as for `load_tree`.

    Raises:
      UserError: a missing, unknown, misshaped or non-float key.
    """
    wanted = {
        path_string(key_path): leaf.shape
        for key_path, leaf in jax.tree_util.tree_leaves_with_path(abstract)
    }
    keys = {path: locate(path) for path in wanted}
    known = {name for name, _ in keys.values()}
    missing = [
        (name, wanted[path][::-1] if transposed else wanted[path])
        for path, (name, transposed) in keys.items()
        if name not in tensors
    ]
    if missing:
        name, shape = missing[0]
        raise UserError(
            f"key {name!r} of shape {list(shape)} is missing from {source}{_more(missing)}"
        )
    unknown = sorted(name for name in tensors if name not in known and not ignore(name))
    if unknown:
        tensor = tensors[unknown[0]]
        raise UserError(
            f"{tensor.file} has a key that this model has no place for: {unknown[0]!r} of "
            f"shape {list(tensor.shape)}{_more(unknown)}"
        )
    for path, (name, transposed) in keys.items():
        shape = wanted[path][::-1] if transposed else wanted[path]
        if tensors[name].shape != tuple(shape):
            raise UserError(
                f"key {name!r} in {tensors[name].file} has shape {list(tensors[name].shape)}, "
                f"the configuration asks for {list(shape)}"
            )
        if tensors[name].dtype not in FLOATS:
            raise UserError(
                f"key {name!r} in {tensors[name].file} is stored as {tensors[name].dtype}; only "
                f"{', '.join(FLOATS)} are read (is the checkpoint quantised?)"
            )
    return keys


def load_tree(
    abstract: dict[str, Any],
    mesh: Mesh,
    tensors: Tensors,
    locate: Callable[[str], tuple[str, bool]],
    dtype: Any,
    source: str,
    ignore: Callable[[str], bool] = lambda name: False,
    convert: Convert | None = None,
    in_blocks: bool = False,
) -> dict[str, Any]:
    """Read a parameter tree strictly, each device only its own slices.

    Args:
      abstract: tree of things with a `shape` (from `jax.eval_shape`).
      locate: parameter path -> (key in the checkpoint, whether it is stored transposed).
      dtype: what the parameters are stored in on the devices.
      source: the file or directory, for messages.
      ignore: keys that may be there and are not read.
      convert: what becomes of each entry of the tree, such as a layer, before the next is read.
      in_blocks: matrices that lie in blocks are not read: `convert` gets `BlockRows`.

    Raises:
      UserError: a missing, unknown, misshaped or non-float key.
    """
    keys = check_keys(abstract, tensors, locate, source, ignore)

    def load(key_path: Any, leaf: Any, sharding: jax.sharding.Sharding) -> Any:
        name, transposed = keys[path_string(key_path)]
        tensor, shape = tensors[name], tuple(leaf.shape)
        if in_blocks and tensor.blocks is not None and len(shape) == 2:
            return BlockRows(shape, transposed, tensor.blocks)
        return _place(tensor, shape, transposed, sharding, np.dtype(dtype))

    shardings = param_shardings(mesh, abstract)

    def read(name: str) -> dict[str, Any]:
        trees = ({name: abstract[name]}, {name: shardings[name]})
        return jax.tree_util.tree_map_with_path(load, *trees)

    placed: dict[str, Any] = {}
    for name in abstract:
        # What was read has no name here: it is gone once it is converted.
        placed |= (convert or dict)(read(name))
    return placed


def _place(
    tensor: Tensor,
    shape: tuple[int, ...],
    transposed: bool,
    sharding: jax.sharding.Sharding,
    dtype: np.dtype,
) -> jax.Array:
    """A tensor of a file on the devices, each with its slice; the host has one slice at a time."""
    owners: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        spans = tuple(s.indices(n)[:2] for s, n in zip(index, shape))
        owners.setdefault(spans, []).append(device)
    placed: list[jax.Array] = []
    for spans, devices in owners.items():
        jax.block_until_ready(placed)  # the slice before has left the host
        stored = spans[::-1] if transposed else spans
        block = tensor.read(tuple(slice(*span) for span in stored))
        block = np.ascontiguousarray(block.T if transposed else block, dtype)
        placed += [jax.device_put(block, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def _more(items: list[Any]) -> str:
    return f" (and {len(items) - 1} more such)" if len(items) > 1 else ""


def save_safetensors(
    path: str, arrays: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    """Write a safetensors file so that `path` is at every moment the old or the new one."""
    from safetensors.numpy import save_file

    contiguous = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    with replacing(path) as new:
        with open(new, "wb") as file:
            mode = os.fstat(file.fileno()).st_mode
        save_file(contiguous, new, metadata)
        os.chmod(new, mode & 0o777)  # of its own it would be the owner's alone


def save_json(path: str, value: dict[str, Any]) -> None:
    """Write a JSON object as Hugging Face does, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def host_array(x: Any, dtype: Any = None) -> np.ndarray:
    """A parameter on the host, in `dtype` (None: as it is stored).

    Of an array that lies over several processes each of them gets the whole, and has to ask.
    """
    array = on_host(x)
    return array if dtype is None else array.astype(np.dtype(dtype))


def sample_bytes(x: Any, count: int = 1024) -> bytes:
    """Up to `count` elements at even distances, rounded to bfloat16, as little-endian bytes.

    Gathered by index, so the result does not depend on how `x` is laid out over devices. What
    lies whole in the host's memory is read there: a gather is a program for each shape.
    """
    size = int(np.prod(x.shape))
    if isinstance(x, jax.Array) and [d.platform for d in x.devices()] == ["cpu"]:
        x = np.asarray(x)
    flat = np.arange(min(size, count), dtype=np.int64) * size // min(size, count)
    places = np.unravel_index(flat, x.shape)
    if getattr(x, "is_fully_addressable", True):
        values = np.asarray(x[places])
    else:  # every process has parts, and all of them get the values
        whole = replicated(x.sharding.mesh)
        values = np.asarray(jax.jit(lambda x: x[places], out_shardings=whole)(x))
    values = values.astype(np.float32)
    return values.astype(ml_dtypes.bfloat16).view(np.uint16).astype("<u2").tobytes()


def flatten(tree: Any) -> dict[str, Any]:
    """A parameter tree as {"layers_0/mlp/up_proj/kernel": leaf}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_string(key_path): leaf for key_path, leaf in leaves}


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *outer, last = path.split("/")
        inner = tree
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = leaf
    return tree


def pick(names: Iterable[str], available: dict[str, Any]) -> list[str]:
    """Those of `names` that are there, in order, once each."""
    return [name for name in dict.fromkeys(names) if name in available]
