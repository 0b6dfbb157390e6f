"""Fingerprints of backbones, so that heads are used only with their backbone."""

import hashlib

from medusa_jax.config import LlamaConfig
from medusa_jax.interop.tensors import flatten, pick, sample_bytes
from medusa_jax.sharding import Params


class Fingerprint:
    """SHA-256 over shapes and a sample of the weights, updated entry by entry like `hashlib`.

    Values are rounded to bfloat16 first, so that float32 and bfloat16 loads of one bfloat16 file agree.
    Independent of sharding. Needs stored (unfused) parameters.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, list[int]] = {}
        self.samples: dict[str, bytes] = {}

    def update(self, config: LlamaConfig, entries: Params) -> None:
        """Add entries of the tree, such as {"layers_3": ...}."""
        flat = flatten(entries)
        self.shapes |= {path: list(leaf.shape) for path, leaf in flat.items()}
        known = pick(sampled(config), flat)
        self.samples |= {path: sample_bytes(flat[path]) for path in known}

    def hexdigest(self, config: LlamaConfig) -> str:
        """The fingerprint, 16 hex digits."""
        digest = hashlib.sha256()
        for path in sorted(self.shapes):
            digest.update(f"{path}{self.shapes[path]};".encode())
        for path in pick(sampled(config), self.samples):
            digest.update(self.samples[path])
        return digest.hexdigest()[:16]


def fingerprint(config: LlamaConfig, params: Params) -> str:
    """The fingerprint of a whole tree."""
    result = Fingerprint()
    result.update(config, params)
    return result.hexdigest(config)


def sampled(config: LlamaConfig) -> list[str]:
    """Paths of the parameters whose values are sampled."""
    last = f"layers_{config.n_layers - 1}"
    return [
        "embed_tokens/embedding",
        "layers_0/self_attn/q_proj/kernel",
        f"{last}/self_attn/o_proj/kernel",
        f"{last}/mlp/down_proj/kernel",
        "norm/scale",
        "lm_head/kernel",
    ]
