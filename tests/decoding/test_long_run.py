"""The long run: 100,000 generated tokens in each precision, drafted against plain decoding.

    python -m pytest -m slow -s tests/decoding/test_long_run.py

Planted drafters (every depth is accepted often), a new random tree for every run, batches of
1, 3 and 8, greedy and sampled. In float64 not one token may differ. In float32 passes over one
and over M tokens round differently: there texts may part only where the two best scores are tied
to within that rounding, and the rate is printed.
"""

from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from planted import drafted, filtered_scores, plain_texts, sampling_of, texts_of
from tiny import decoder, forward_logits, random_params, tiny_arch
from trees import random_tree

from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.decoding.sampling import gumbel, row_keys

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64")]

VOCAB, NODES, DEPTH, NEW = 61, 16, 5, 200
TOKENS = 100_000
BATCHES = (1, 3, 8)
MODES = {
    "greedy": {},
    "T 0.7": {"temperature": 0.7},
    "T 1.0": {"temperature": 1.0},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
}
# Scores this close count as tied in float32; its rounding moves logits by up to 4e-5.
TIE = 2e-4


def is_tie(config, params, text, row, request, mode):
    """Whether float64 sees the two best scores, or a token and a filter's cut, as tied."""
    logits = jnp.asarray(forward_logits(config, params, text)[-1:])[None]
    if not mode:
        best = np.sort(logits[0, 0])[-2:]
        return best[1] - best[0] < TIE
    scores = []
    for near in (1 - TIE, 1, 1 + TIE):
        top_p = min(near * mode.get("top_p", 1.0), 1.0)
        sampling = sampling_of(1, mode["temperature"], top_p=top_p)
        scores.append(np.asarray(filtered_scores(logits, sampling))[0, 0])
    key = row_keys(np.uint32([request.seed[row]]), np.int32([row]))
    noise = gumbel(key, np.array([[len(text)]]), VOCAB, jnp.float64)
    best = np.sort(scores[1] + noise[0, 0])[-2:]
    kept = [np.isfinite(s) for s in scores]
    return best[1] - best[0] < TIE or (kept[0] != kept[2]).any()


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_a_hundred_thousand_tokens(dtype):
    config, rng = tiny_arch(vocab_size=VOCAB), np.random.default_rng(0)
    shape = random_tree(rng, NODES, DEPTH)  # only its sizes matter: trees are traced
    stored = [random_params(config, seed) for seed in range(2)]
    models = [(params, *decoder(config, params, dtype)) for params in stored]
    tokens = parted = 0
    for batch, (name, mode) in product(BATCHES, MODES.items()):
        acceptance = "sampled" if mode else "greedy"
        done, histogram = 0, np.zeros(DEPTH + 1, int)
        while done < TOKENS / len(BATCHES) / len(MODES):
            params, *_ = model = models[rng.integers(len(models))]
            lengths = rng.integers(1, 16, batch)
            prompts = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
            fields = {k: [v] * batch for k, v in mode.items()}
            seeds = rng.integers(0, 2**31, batch).tolist()
            request = DecodeRequest(prompts, [NEW] * batch, seed=seeds, **fields)
            expected = plain_texts(config, model, request, acceptance)
            tree, seed = random_tree(rng, NODES, DEPTH), int(rng.integers(2**31))
            given = config, model, request, expected
            progress = drafted(*given, tree, seed, acceptance, shape)
            histogram += np.asarray(progress.histogram_BL).sum(0)
            for row, (got, want) in enumerate(zip(texts_of(progress), expected)):
                done += len(got)
                if got == want:
                    continue
                assert dtype == jnp.float32, (name, batch, tree.choices, seeds[row])
                first = next(i for i, (a, b) in enumerate(zip(got, want)) if a != b)
                text = prompts[row] + want[:first]
                assert is_tie(config, params, text, row, request, mode)
                parted += 1
        assert (histogram > 0.02 * histogram.sum()).all(), histogram
        tokens += done
        steps = f"steps of 1..{DEPTH + 1} tokens {histogram.tolist()}"
        print(f"{jnp.dtype(dtype)} batch {batch} {name}: {done} tokens, {steps}")
    print(f"{jnp.dtype(dtype)}: {tokens} tokens, {parted} divergences, all of them ties")
    assert tokens >= TOKENS and (parted == 0 or dtype == jnp.float32)
