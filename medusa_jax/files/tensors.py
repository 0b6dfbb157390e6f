"""Checkpoint files as named, lazily read tensors; the name of a file chooses its reader."""

import os

import numpy as np

from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.files.json_files import read_json
from medusa_jax.files.tensor import Index, Tensor, Tensors
from medusa_jax.whole_files import replacing

# In order of preference.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"
# A link to the GGUF file in the directory that `resolve` makes for it.
GGUF_LINK = "model.gguf"


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

        def read(index: Index) -> np.ndarray:
            try:  # it may be empty, or of a type that NumPy lacks
                return np.asarray(view[index])
            except (SafetensorError, OSError, AttributeError) as error:
                raise UserError(f"{path}: {name!r} cannot be read: {error}") from error

        return Tensor(path, shape, kind, read, name=name)

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
        return open_weights(file)
    if stands_for_gguf(directory):
        return open_weights(os.readlink(os.path.join(directory, GGUF_LINK)))
    raise UserError(
        f"{directory} holds no weights: looked for model.safetensors, pytorch_model.bin and "
        "the .index.json of either"
    )


def weights_file(directory: str) -> str:
    """The file of a model's weights, or the index of its shards; "" if there is none, or for a GGUF file.

    A line says which other files are not read.
    """
    files = weights_files(directory)
    if not files:
        return ""
    file, *ignored = files
    if ignored:
        inform(f"{directory}: reading {file}, not {', '.join(ignored)}")
    return os.path.join(directory, file)


def weights_files(directory: str) -> list[str]:
    """The names of a directory's files of weights, the preferred one first.

    The order is that of transformers: a single file comes before an index of shards. transformers leaves an old index
    in place when it saves a model again in one file.
    """
    names = [name + end for name in WEIGHTS for end in ("", INDEX)]
    return [name for name in names if os.path.isfile(os.path.join(directory, name))]


def stands_for_gguf(directory: str) -> bool:
    """Whether a model directory is the one that `resolve` makes for a GGUF file."""
    return os.path.islink(os.path.join(directory, GGUF_LINK))


def open_weights(path: str) -> Tensors:
    """Open a file of weights: safetensors, GGUF or an index of shards by its suffix, else torch's format.

    Raises:
      UserError: the file is unreadable.
    """
    if path.endswith(INDEX):
        return _open_shards(path)
    if path.endswith(".safetensors"):
        return open_safetensors(path)
    if path.lower().endswith(".gguf"):
        from medusa_jax.files.gguf.architecture import open_gguf  # only for such files

        return open_gguf(path)
    from medusa_jax.files.torch_files import open_torch  # only for such files

    _refuse_pointer(path)
    return open_torch(path)


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
        shard_tensors = open_weights(path)
        if duplicates := sorted(tensors.keys() & shard_tensors.keys()):
            file = tensors[duplicates[0]].file
            raise UserError(f"key {duplicates[0]!r} is both in {file} and in {path}")
        tensors |= shard_tensors
    if gaps := sorted(weight_map.keys() - tensors.keys()):
        raise UserError(f"key {gaps[0]!r} is missing from the shards of {index}")
    return tensors


def _refuse_pointer(path: str) -> None:
    """Raise for the small text file that a clone without git-lfs has instead of weights."""
    try:
        with open(path, "rb") as f:
            head = f.read(40)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"{path} is a git-lfs pointer, not the weights: run `git lfs pull`")


def save_safetensors(
    path: str, arrays: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    """Write a safetensors file atomically."""
    from safetensors.numpy import save_file

    contiguous = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    with replacing(path) as target:
        with open(target, "wb") as file:
            mode = os.fstat(file.fileno()).st_mode
        save_file(contiguous, target, metadata)
        os.chmod(target, mode & 0o777)  # safetensors sets owner-only permissions
