"""Replay a certificate of draft heads without JAX: python examples/verify_heads.py DIRECTORY

To test an engine, pass `replay` a function of yours in place of `medusa`:

    logits(token_ids [P + K], states [A, P, D]) -> [K, P, vocabulary]

`states` are the inputs of the heads at positions 0 to P - 1: the model's last hidden states, with A = 1, or A tapped streams,
the lowest layer first. Level k at position t guesses token t + k + 2 (k from 0) and may read tokens up to t + k + 1. Tokens that the
heads do not score have the logit -inf. docs/formats.md has the format.
"""

import sys
from pathlib import Path

import ml_dtypes  # noqa: F401  (NumPy's bfloat16)
import numpy as np
from safetensors.numpy import load_file

LIMIT = 1e-3  # of the largest recorded logit; 16-bit arithmetic needs some 3e-2


def medusa(directory):
    """The logits of Medusa heads in the layout of their authors, computed in float32."""
    files = load_file(Path(directory) / "medusa_lm_head.safetensors")
    weights = {key: np.float32(x) for key, x in files.items()}
    n_heads = 1 + max(int(key.split(".")[0]) for key in weights)
    n_layers = sum(
        key.startswith("0.") and key.endswith("linear.weight") for key in weights
    )

    def logits(token_ids, states):
        levels = []
        for k in range(n_heads):
            x = states[0]
            for j in range(n_layers):
                y = (
                    x @ weights[f"{k}.{j}.linear.weight"].T
                    + weights[f"{k}.{j}.linear.bias"]
                )
                x = x + y / (1 + np.exp(-y))
            levels.append(x @ weights[f"{k}.{n_layers}.weight"].T)
        return np.stack(levels)

    return logits


def replay(directory, logits):
    """Compare each level with the certificate; returns whether all of them fit."""
    recorded = load_file(Path(directory) / "certificate" / "certificate.safetensors")
    ours, fits = logits(recorded["token_ids"], recorded["states"]), []
    for k, (ids, want) in enumerate(zip(recorded["top_ids"], recorded["top_logits"])):
        got = np.take_along_axis(ours[k], ids, axis=-1)
        difference = np.abs(got - want).max() / np.abs(recorded["top_logits"]).max()
        guess = ours[k, -1].argmax()
        fits.append(difference <= LIMIT and guess == recorded["chain"][k])
        print(
            f"level {k + 1}: {difference:.1e}, guess {guess}, {'fits' if fits[-1] else 'does not fit'}"
        )
    return all(fits)


def main(*directories):
    if len(directories) != 1:
        print("usage: python examples/verify_heads.py DIRECTORY", file=sys.stderr)
        return 2
    try:
        return 0 if replay(directories[0], medusa(directories[0])) else 1
    except FileNotFoundError as error:  # `convert --to tgi` writes these files
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
