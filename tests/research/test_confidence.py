"""The study of DSpark's confidences: replays with planted signals, and the whole command."""

import json

import numpy as np
import pytest
from files import PROMPTS, write_lines
from tiny import write_heads, write_model

from medusa_jax.heads.dflash import DSparkConfig
from medusa_jax.tree.tree import Tree
from research import confidence

COSTS = np.array([1.0, 1.5])


def test_a_signal_that_tells_right_guesses_reaches_the_bound_and_noise_gains_nothing():
    rng = np.random.default_rng(0)
    gain = [1 + np.stack([np.zeros(300), rng.integers(0, 2, 300)], 1) for _ in range(8)]
    told = [np.stack([own[:, 1:] - 1, rng.random((300, 1))], -1) for own in gain]
    found = confidence.compare(gain, told, COSTS)
    # A right draft: 2 tokens in 1.5, a wrong one: 1 in 1, each time as good as it can be.
    assert found["confidences"] == pytest.approx(found["bound"], rel=1e-6)
    assert found["bound"] > 1.1 * found["one tree"]
    assert found["probabilities"] == pytest.approx(found["one tree"], rel=0.05)


def test_gains_follow_the_true_path():
    trees = [Tree.none(), Tree.from_choices([(0,), (0, 1)]), Tree.chain(2)]
    ranks_PK = np.array([[0, 1], [0, 2], [1, 0]])
    assert confidence.gains(ranks_PK, trees).tolist() == [[1, 3, 2], [1, 2, 2], [1, 1, 1]]


def test_separation_is_the_share_of_ordered_pairs():
    signal, right = np.array([0.1, 0.4, 0.3, 0.9]), np.array([True, False, True, True])
    # Pairs (right, wrong): (.9, .4) is in order, (.1, .4) and (.3, .4) are not.
    assert confidence.separates(signal, right) == pytest.approx(1 / 3)


@pytest.mark.wide
def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config, params = write_model(tmp_path / "model")
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": p} for p in PROMPTS])
    for name in ("sure", "unsure"):
        fields = {"n_layers": 1, "markov_rank": 4, "tap_layers": "1"}
        heads = DSparkConfig(n_heads=2, confidence=name == "sure", **fields)
        write_heads(tmp_path / name, config, params, heads)
    flags = "--model model --prompts prompts.jsonl --sizes 1,2,3 --rounds 1"
    more = "--drafter sure --out out --max_new_tokens 24"
    assert confidence.main(f"{flags} {more}".split()) == 0
    assert "| bound |" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "confidence.json").read_text())
    assert found["speed"].keys() == {"one tree", "confidences", "probabilities", "bound"}
    assert confidence.main(f"{flags} --drafter unsure".split()) == 2
    assert "have no confidence" in capsys.readouterr().err
