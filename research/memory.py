"""What a device holds in decoding, summed up by hand: the check on what a compiled program is said to take.

Counted with what is widened, which stays for the whole loop; of training see `training/counted.py`.
"""

from typing import Any

from medusa_jax.sharding import PyTree
from medusa_jax.training.counted import (
    COPIES,
    F32,
    bytes_on_device,
    narrow_elements,
    shard_of,
)


def decoding_bytes(
    variables: PyTree, state: Any, nodes: int, vocab_size: int
) -> dict[str, int]:
    """Bytes by purpose for decoding, from shapes with shardings.

    Logits are in float32, each device has those of its columns of the LM head. On a CPU, products of
    16-bit kernels with several rows stay in 16 bits; before the loop XLA makes float32 copies of the
    embedding table and of kernels multiplied with a single row, those of the draft heads. An
    accelerator makes no copies.
    """
    cache = (state.cache, state.drafter)
    rows = shard_of(state.status_B).size
    copied = [
        variables["backbone"]["embed_tokens"],
        variables["heads"] if rows == 1 else {},
    ]
    columns = vocab_size // state.status_B.sharding.mesh.shape["tensor"]
    return {
        "parameters": bytes_on_device(variables),
        "caches": bytes_on_device(cache),
        "other state": bytes_on_device(state) - bytes_on_device(cache),
        "logits": rows * nodes * columns * F32,
        COPIES: narrow_elements(copied) * F32,
    }
