"""The table of models that are known by their weights: any file of one brings its bundled heads, at any path, quantised or not."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from medusa_jax.files.fingerprint import sample_bytes
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.hf_config import read_config
from medusa_jax.files.hub import resolve


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model that is known by its weights.

    Attributes:
      shape: number of layers, width and vocabulary size.
      norm: `norm_digest` of its files.
      trained_on: the file that the heads were trained on, for messages.
      heads: folder under `medusa_jax/models` with a folder per drafter.
      drafter: the default drafter.
    """

    shape: tuple[int, int, int]
    norm: str
    trained_on: str
    heads: str
    drafter: str


KNOWN = [
    KnownModel(
        shape=(24, 896, 151936),
        norm="d72753f68dbb953b",
        trained_on="the Q4_K_M file of Qwen2.5-Coder-0.5B-Instruct",
        heads="qwen25coder05",
        drafter="eagle",
    ),
    KnownModel(
        shape=(30, 576, 49152),
        norm="b1c3b88d13d30d19",
        trained_on="the Q4_1 file of SmolLM2-135M-Instruct",
        heads="smollm2",
        drafter="hydrapp",
    ),
]


@lru_cache(maxsize=8)
def known_model(path_or_id: str) -> KnownModel | None:
    """The row of a model's weights, which are opened only if a row has their shape."""
    directory = resolve(path_or_id)
    config = read_config(directory)
    shape = config.n_layers, config.d_model, config.vocab_size
    rows = {row.norm: row for row in KNOWN if row.shape == shape}
    return rows.get(norm_digest(directory)) if rows else None


def norm_digest(directory: str) -> str:
    """Digest of the final norm's scale, 16 hex digits: quantisation leaves it as it is, but for its type."""
    scale_D = BaseFiles.open(directory).array("norm/scale")
    return hashlib.sha256(sample_bytes(scale_D, scale_D.size)).hexdigest()[:16]
