"""The device mesh and the one table that says where every parameter lives.

Initialised, imported and restored parameters are all placed by `param_shardings`, so a model
that runs on one device (mesh 1,1,1) needs no rewrite for many.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from medusa_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")

# First match wins. Kernels are [in, out]: layers that widen are split over their outputs,
# layers that narrow over their inputs (Megatron), the other side goes to fsdp.
RULES: tuple[tuple[str, P], ...] = (
    (r"embed_tokens/embedding$", P("tensor", "fsdp")),
    (r"lm_head/(kernel|up)$", P("fsdp", "tensor")),
    (r"lm_head/down$", P("fsdp", None)),
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
    # Everything else that multiplies, in the draft heads.
    (r"heads_\d+/layers_\d+/(.*/)?bias$", P("tensor")),
    (r"/kernel$", P("fsdp", "tensor")),
    (r".*", P()),
)


def make_mesh(shape: Sequence[int] = (1, 1, 1)) -> Mesh:
    """A mesh over (data, fsdp, tensor); one axis may be -1 and takes the devices left over.

    With fewer devices asked for than there are, the first ones are used.

    Raises:
      UserError: the shape needs more devices than there are, or does not divide them.
    """
    sizes = list(shape)
    devices = jax.devices()
    if len(sizes) != 3 or sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        raise UserError(
            f"a mesh is three sizes data,fsdp,tensor (one may be -1), not {shape}"
        )
    known = math.prod(s for s in sizes if s != -1)
    if -1 in sizes:
        if len(devices) % known:
            raise UserError(
                f"mesh {tuple(shape)}: {known} does not divide the {len(devices)} devices"
            )
        sizes[sizes.index(-1)] = len(devices) // known
    wanted = math.prod(sizes)
    if wanted > len(devices):
        raise UserError(
            f"mesh {tuple(sizes)} needs {wanted} devices, this process has {len(devices)}"
        )
    # Auto, not the default Explicit axes: under Explicit ones `nn.Embed` cannot gather.
    return jax.make_mesh(
        tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:wanted]
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over the data and fsdp axes, everything else whole."""
    return NamedSharding(mesh, P(("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, P())


def path_string(key_path: Sequence[Any]) -> str:
    """`(DictKey('layers_0'), DictKey('mlp'))` -> `"layers_0/mlp"`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in key_path)


def spec_for(path: str) -> P:
    """The mesh axes of the parameter at `path`."""
    return next(spec for pattern, spec in RULES if re.search(pattern, path))


def param_shardings(mesh: Mesh, tree: Any) -> Any:
    """The sharding of every leaf of a parameter tree (arrays or ShapeDtypeStructs).

    Raises:
      UserError: a mesh axis does not divide the dimension that it splits.
    """

    def place_leaf(key_path: Sequence[Any], leaf: Any) -> NamedSharding:
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


def init_sharded(mesh: Mesh, init: Callable[[jax.Array], Any], key: jax.Array) -> Any:
    """Run `init(key)` so that every parameter is born on the devices where it belongs."""
    shardings = param_shardings(mesh, jax.eval_shape(init, key))
    return jax.jit(init, out_shardings=shardings)(key)


def place(mesh: Mesh, tree: Any) -> Any:
    """Put a tree of host arrays onto the mesh."""
    return jax.tree.map(
        lambda leaf, sharding: jax.device_put(np.asarray(leaf), sharding),
        tree,
        param_shardings(mesh, tree),
    )
