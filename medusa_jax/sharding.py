"""The device mesh and the table that maps every parameter to mesh axes.

`param_shardings` places initialised, imported and restored parameters alike, so a model that runs on
one device (mesh 1,1,1) runs unchanged on many.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from medusa_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")

# Nested dictionaries of arrays, or of their shapes.
PyTree = Any
# A parameter tree: nested dictionaries of arrays.
Params = dict[str, Any]

# First match wins. Kernels are [in, out]: as in Megatron, tensor splits the outputs of layers that
# widen and the inputs of layers that narrow; fsdp splits the other side.
RULES: tuple[tuple[str, P], ...] = (
    (r"embed_tokens/embedding$", P("tensor", "fsdp")),
    (r"lm_head/(kernel|up)$", P("fsdp", "tensor")),
    (r"(lm_head/down|confidence/kernel)$", P("fsdp", None)),
    (r"/(q_proj|k_proj|v_proj|gate_proj|up_proj)/(kernel|codes)$", P("fsdp", "tensor")),
    (r"/(q_proj|k_proj|v_proj|gate_proj|up_proj)/bias$", P("tensor")),
    (r"/(qkv_proj|gate_up_proj)/kernel$", P("fsdp", "tensor", None)),
    (r"/(qkv_proj|gate_up_proj)/bias$", P("tensor", None)),
    (r"(o_proj|down_proj)/(kernel|codes)$", P("tensor", "fsdp")),
    # Scales of quantised kernels and the factors A [in, rank], B [rank, out] of adapters.
    (r"(o_proj|down_proj)/a$", P("tensor", None)),
    (r"(o_proj|down_proj)/(scales|b)$", P(None, "fsdp")),
    (r"(_proj|lm_head)/a$", P("fsdp", None)),
    (r"(_proj|lm_head)/(scales|b)$", P(None, "tensor")),
    # All other kernels, in the draft heads.
    (r"heads_\d+/layers_\d+/(.*/)?bias$", P("tensor")),
    (r"/kernel$", P("fsdp", "tensor")),
    (r".*", P()),
)


def make_mesh(
    shape: Sequence[int] = (1, 1, 1), devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Make a mesh over (data, fsdp, tensor) of the first devices; one axis may be -1: the remaining ones.

    Args:
      devices: by default those of this run; a topology's, to compile for devices that are not here.

    Raises:
      UserError: the shape needs more devices than available, or does not divide them.
    """
    sizes, n_processes = list(shape), jax.process_count() if devices is None else 1
    devices = list(jax.devices() if devices is None else devices)
    n, known = len(devices), math.prod(s for s in sizes if s != -1)
    if len(sizes) != 3 or sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        raise UserError(
            f"a mesh is three sizes data,fsdp,tensor (one may be -1), not {shape}"
        )
    if -1 in sizes and n % known:
        raise UserError(f"mesh {tuple(shape)}: {known} does not divide the {n} devices")
    sizes = [n // known if s == -1 else s for s in sizes]
    used = devices[: math.prod(sizes)]
    if len(used) < math.prod(sizes):
        raise UserError(
            f"mesh {tuple(sizes)} needs {math.prod(sizes)} devices, this process has {n}"
        )
    if n_processes > len({d.process_index for d in used}):
        raise UserError(
            f"mesh {tuple(sizes)} leaves out all devices of some of the {n_processes} "
            f"processes: together they have {n}"
        )
    # Auto, not the default Explicit axes, with which `nn.Embed` cannot gather.
    kinds = (AxisType.Auto,) * 3
    try:
        return jax.make_mesh(tuple(sizes), AXES, axis_types=kinds, devices=used)
    except NotImplementedError:  # 2 x 32 on 4 x 4 x 4 chips splits an axis of the torus
        grid = mesh_utils.create_device_mesh(sizes, used, allow_split_physical_axes=True)
        return Mesh(grid, AXES, axis_types=kinds)


# Batch rows are split over both: fsdp gathers the weights of a layer, not the rows. fsdp comes first,
# as in the device order of a kernel (parts over fsdp, copies over data). In the other order XLA may
# exchange rows of a product: research/log/.
ROWS = ("fsdp", "data")


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of microbatches [A, B / A, ...], with rows over the data and fsdp axes."""
    return NamedSharding(mesh, P(None, ROWS))


def local_rows(mesh: Mesh, n: int) -> np.ndarray:
    """Indices, ascending, of a batch's `n` rows on devices of this process.

    Processes that share rows, because the tensor axis spans them, get the same indices.
    """
    spans = NamedSharding(mesh, P(ROWS)).addressable_devices_indices_map((n,)).values()
    return np.unique(np.concatenate([np.arange(n)[span] for span in spans]))


def row_shards(mesh: Mesh) -> int:
    """Number of parts that the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


# The next four functions are for use inside compiled functions, where they fix shardings that XLA would choose.


def split_rows(mesh: Mesh | None, x: jax.Array) -> jax.Array:
    """Split the rows of x [B, ...] over the devices if their number divides B; else replicate x.

    Otherwise XLA follows the weights: every device computes all rows of a slice of each layer.
    """
    return _constrained(mesh, x, lambda mesh: NamedSharding(mesh, P(_row_axes(mesh, x))))


def split_embedded(mesh: Mesh | None, x_BTD: jax.Array) -> jax.Array:
    """Split looked-up embeddings over fsdp along their width, like the table.

    `split_rows` comes next. In a single step XLA would replicate all rows in between.
    """
    if mesh is None or x_BTD.shape[0] % mesh.shape["data"]:
        return x_BTD
    spec = P("data", None, "fsdp")
    return _constrained(mesh, x_BTD, lambda mesh: NamedSharding(mesh, spec))


def pin_state(mesh: Mesh | None, state: PyTree) -> PyTree:
    """Constrain every leaf of a decode state to `decode_shardings`.

    Otherwise XLA could return other shardings than a program was given, and the next call would be
    compiled again.
    """
    return _constrained(mesh, state, lambda mesh: decode_shardings(mesh, state))


def placed(mesh: Mesh | None, state: PyTree) -> PyTree:
    """A decode state made by the host, placed as programs return it: otherwise JAX compiles them twice.

    With several processes it stays as it is: JAX moves no array that spans them.
    """
    if mesh is None or jax.process_count() > 1:
        return state
    return jax.device_put(state, decode_shardings(mesh, state))


def on_all(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """Replicate on every device; each host can then read from its own devices."""
    return _constrained(mesh, tree, replicated)


def _constrained(
    mesh: Mesh | None, tree: PyTree, shardings: Callable[[Mesh], PyTree]
) -> PyTree:
    """The tree with these shardings; as it is on one device or without a mesh."""
    if mesh is None or mesh.size == 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, shardings(mesh))


def decode_shardings(mesh: Mesh, state: PyTree) -> PyTree:
    """The sharding of every leaf [B, ...] of a decode state: rows over the devices.

    Keys and values [B, G, S, H] are also split over the tensor axis, where their heads are computed.
    A dimension that an axis does not divide is not split. The gate's arrays are those of all rows.
    """

    def place_leaf(key_path: KeyPath, leaf: jax.Array) -> NamedSharding:
        rows, path = _row_axes(mesh, leaf), path_string(key_path)
        if path.startswith("gate/"):
            return replicated(mesh)
        if not re.search(r"(^|/)cache/", path):
            return NamedSharding(mesh, P(rows))
        heads = None if leaf.shape[1] % mesh.shape["tensor"] else "tensor"
        return NamedSharding(mesh, P(rows, heads))

    return jax.tree_util.tree_map_with_path(place_leaf, state)


def _row_axes(mesh: Mesh, x: jax.Array) -> tuple[str, ...] | None:
    return None if x.shape[0] % row_shards(mesh) else ROWS


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding with a whole copy on every device."""
    return NamedSharding(mesh, P())


def path_string(key_path: KeyPath) -> str:
    """`(DictKey('layers_0'), DictKey('mlp'))` -> `"layers_0/mlp"`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in key_path)


def spec_for(path: str) -> P:
    """The mesh axes of the parameter at `path`."""
    return next(spec for pattern, spec in RULES if re.search(pattern, path))


def param_shardings(mesh: Mesh, tree: PyTree) -> PyTree:
    """The sharding of every leaf of a parameter tree (arrays or ShapeDtypeStructs).

    Raises:
      UserError: a mesh axis does not divide a dimension that it would split.
    """

    def place_leaf(key_path: KeyPath, leaf: jax.Array) -> NamedSharding:
        path = path_string(key_path)
        spec = spec_for(path)
        for dim, axis in zip(leaf.shape, spec, strict=False):
            size = mesh.shape[axis] if axis else 1
            if dim % size:
                raise UserError(
                    f"mesh axis '{axis}' has {size} devices, which does not divide "
                    f"dimension {dim} of {path} {tuple(leaf.shape)}"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(place_leaf, tree)


def shapes_with(tree: PyTree, shardings: PyTree) -> PyTree:
    """The shapes of a tree of arrays or shapes, with these shardings."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def bytes_on_device(tree: PyTree) -> int:
    """Bytes on one device of arrays, or of shapes with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    )


def init_sharded(mesh: Mesh, init: Callable[[jax.Array], PyTree], key: jax.Array) -> PyTree:
    """Run `init(key)` with every parameter created on its devices."""
    shardings = param_shardings(mesh, jax.eval_shape(init, key))
    return jax.jit(init, out_shardings=shardings)(key)
