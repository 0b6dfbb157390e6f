"""The promise of `"lossless": "bitwise"` at length: 100,000 drafted tokens, not one that differs."""

import numpy as np
import pytest

import medusa_jax
from medusa_jax.api import Options
from medusa_jax.native import library

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library() is None, reason="no C++ compiler"),
]
TOKENS = 100_000


def test_no_token_differs_in_float32(monkeypatch):
    """Greedy, sampled and from a nucleus, batches of one and three, small and large trees; what is
    compared are texts of the bundled model after random prompts, which leave many near ties."""
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "native")
    model = medusa_jax.load(drafter="hydra", tree="bundled", dtype="float32")
    assert model.lossless("greedy") == "bitwise"
    rng = np.random.default_rng(0)
    compared = 0
    for seed in range(1000):
        for batch, temperature, top_p, tree in (
            (1, 0.0, 1.0, "bundled"), (3, 0.0, 1.0, "16"),
            (1, 0.9, 1.0, "16"), (3, 0.9, 0.9, "bundled"),
        ):  # fmt: skip
            prompts = rng.integers(0, model.config.vocab_size, (batch, 32)).tolist()
            options = Options(440, temperature, top_p=top_p, seed=seed, eos_ids=())
            plain = model.generate(prompts, options, tree="none")
            drafted = model.generate(prompts, options, tree=tree)
            for one, other in zip(plain, drafted):
                assert one.token_ids == other.token_ids, (seed, batch, temperature)
                compared += other.new_tokens
        if compared >= TOKENS:
            break
    assert compared >= TOKENS
    print(f"{compared} tokens compared")
