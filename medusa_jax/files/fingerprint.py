"""Fingerprints of backbones, so that heads are used only with their backbone."""

import hashlib

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from medusa_jax.arch import LlamaConfig
from medusa_jax.files.source import flatten
from medusa_jax.files.tensor import ByRow
from medusa_jax.sharding import Params


def fingerprint(config: LlamaConfig, params: Params) -> str:
    """16 hex digits of the SHA-256 over shapes and a sample of the weights of a backbone's stored (unfused) parameters.

    Values are rounded to bfloat16 first, so that float32 and bfloat16 loads of one bfloat16 file agree.
    Independent of sharding.

    Args:
      params: the tree, or its leaves by path; arrays, or `ByRow` for weights in files.
    """
    flat, digest = flatten(params), hashlib.sha256()
    for path in sorted(flat):
        digest.update(f"{path}{list(flat[path].shape)};".encode())
    for path in sampled(config):
        if path in flat:
            digest.update(sample_bytes(flat[path]))
    return digest.hexdigest()[:16]


def sampled(config: LlamaConfig) -> list[str]:
    """Paths of the parameters whose values are sampled."""
    top = f"layers_{config.n_layers - 1}"
    return [
        "embed_tokens/embedding",
        "layers_0/self_attn/q_proj/kernel",
        f"{top}/self_attn/o_proj/kernel",
        f"{top}/mlp/down_proj/kernel",
        "norm/scale",
        "lm_head/kernel",
    ]


def sample_bytes(x: jax.Array | np.ndarray | ByRow, count: int = 1024) -> bytes:
    """Up to `count` evenly spaced elements, rounded to bfloat16, as little-endian bytes.

    Gathered by index, so the result does not depend on the sharding. An array in host memory is read
    directly, since a gather compiles a program for each shape.
    """
    size = int(np.prod(x.shape))
    if isinstance(x, jax.Array) and [d.platform for d in x.devices()] == ["cpu"]:
        x = np.asarray(x)
    flat = np.arange(min(size, count), dtype=np.int64) * size // min(size, count)
    indices = np.unravel_index(flat, x.shape)
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        values = np.asarray(x[indices])
    else:  # every process has parts, and all of them get the values
        assert isinstance(x.sharding, NamedSharding)
        everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())
        values = np.asarray(jax.jit(lambda x: x[indices], out_shardings=everywhere)(x))
    values = values.astype(np.float32)
    return values.astype(ml_dtypes.bfloat16).view(np.uint16).astype("<u2").tobytes()
