"""Sixteen hex digits that tell backbones apart, so that heads are used on their own."""

import hashlib
from typing import Any

from medusa_jax.config import LlamaConfig
from medusa_jax.interop.tensors import flatten, pick, sample_bytes

Params = dict[str, Any]


class Fingerprint:
    """SHA-256 over shapes and a sample of the weights, which are shown to it part by part.

    Values are rounded to bfloat16 first, so float32 and bfloat16 loads of one bfloat16 file
    agree; sharding plays no part. Needs stored (unfused) parameters.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, list[int]] = {}
        self.samples: dict[str, bytes] = {}

    def see(self, config: LlamaConfig, part: Params) -> None:
        """Take in a part of the tree, such as {"layers_3": ...}, or all of it."""
        flat = flatten(part)
        self.shapes |= {path: list(leaf.shape) for path, leaf in flat.items()}
        known = pick(sampled(config), flat)
        self.samples |= {path: sample_bytes(flat[path]) for path in known}

    def digits(self, config: LlamaConfig) -> str:
        """16 hex digits of all that was seen."""
        digest = hashlib.sha256()
        for path in sorted(self.shapes):
            digest.update(f"{path}{self.shapes[path]};".encode())
        for path in pick(sampled(config), self.samples):
            digest.update(self.samples[path])
        return digest.hexdigest()[:16]


def fingerprint(config: LlamaConfig, params: Params) -> str:
    """The digits of a whole tree."""
    whole = Fingerprint()
    whole.see(config, params)
    return whole.digits(config)


def sampled(config: LlamaConfig) -> list[str]:
    last = f"layers_{config.n_layers - 1}"
    return [
        "embed_tokens/embedding",
        "layers_0/self_attn/q_proj/kernel",
        f"{last}/self_attn/o_proj/kernel",
        f"{last}/mlp/down_proj/kernel",
        "norm/scale",
        "lm_head/kernel",
    ]
