"""Where two texts diverge, and the gap of the scores there."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from closeness import assert_close
from tiny import decoder, forward_logits, random_params, tiny_arch

from medusa_jax.api import Options
from medusa_jax.api.prompts import request_of
from medusa_jax.decoding.sampling import gumbel, row_keys
from medusa_jax.evaluate import divergence
from medusa_jax.model.backbone import Backbone

pytestmark = pytest.mark.usefixtures("x64")

TEXT = [3, 5, 1, 0, 7, 7, 2]


class OneBackbone:
    """What the report needs of a `Model`."""

    no_repeat_ngram_size = 0
    guides = None

    def __init__(self, dtype):
        self.config = tiny_arch(vocab_size=17)
        self.params = random_params(self.config, 2)
        llama, backbone = decoder(self.config, self.params, dtype)
        self.backbone, self.kernels = Backbone(llama, backbone), llama.kernels

    def request(self, prompts, options, ids):
        return request_of(prompts, options, self.config, (), ids, self.guides)

    def engine(self, **_):
        return self

    def scores(self, text):
        """Logits [V] after a text."""
        return np.array(forward_logits(self.config, self.params, text)[-1])


def check_gap(found, scores):
    """The gap is the difference of the two best scores."""
    best = np.sort(scores)[-2:]
    assert_close(best[0] + found.gap, best[1])


@pytest.fixture(scope="module")
def exact():
    import jax

    with jax.enable_x64(True):
        return OneBackbone(jnp.float64)


@pytest.mark.parametrize("temperature", [*wide(0.0), 0.8])
def test_gap_and_position(exact, temperature):
    option = Options(temperature=temperature, seed=4)
    prompt, theirs = TEXT[:3], TEXT[3:]
    ours = [*theirs[:2], 9, 9]
    found = divergence.find_divergence(exact, prompt, ours, theirs, option, 6)
    assert found.position == 2
    scores = exact.scores(TEXT[:5])
    if temperature:
        key = row_keys(jnp.array([4], jnp.uint32), jnp.array([6]))
        noise = gumbel(key, jnp.array([[5]]), 17, jnp.float64)
        scores = scores / np.float32(temperature) + np.asarray(noise)[0, 0]
    check_gap(found, scores)
    assert divergence.find_divergence(exact, prompt, theirs, theirs, option, 6) is None


def test_a_text_that_ends_early_has_no_gap(exact):
    """Rounding moves scores; it does not end one text and not the other."""
    for ours, theirs in (([0, 7], [0, 7, 7]), ([0, 7, 7], [0, 7])):
        found = divergence.find_divergence(exact, TEXT[:3], ours, theirs, Options(), 0)
        assert found.facts() == {"position": 2, "gap": None}  # JSON has no infinity


def test_the_gap_leaves_barred_tokens_out(exact, monkeypatch):
    """Every token of the text is barred."""
    monkeypatch.setattr(exact, "no_repeat_ngram_size", 1)
    found = divergence.find_divergence(exact, TEXT[:3], [0, 7, 9], [0, 7, 8], Options(), 0)
    scores = exact.scores(TEXT[:5])
    scores[TEXT[:5]] = -np.inf
    check_gap(found, scores)


def test_the_gap_is_of_penalised_logits(exact):
    """One new token, 0, is counted; the prompt's only by `repetition_penalty`."""
    option = Options(frequency_penalty=1.5, repetition_penalty=2.0, logit_bias={3: -4.0})
    found = divergence.find_divergence(exact, TEXT[:3], [0, 7], [0, 8], option, 0)
    scores = exact.scores([*TEXT[:3], 0])
    scores[3] -= 4.0
    for token in {*TEXT[:3], 0}:
        scores[token] *= 2.0 if scores[token] < 0 else 0.5
    scores[0] -= 1.5
    check_gap(found, scores)


def test_the_gap_is_between_tokens_that_the_constraint_allows(exact, monkeypatch):
    """The text of a row with a constraint may repeat n-grams."""
    text, bits = [], np.array([1 | 1 << 4 | 1 << 11], np.uint32)
    guide = SimpleNamespace(
        first_W=bits, possible=True, advance=text.extend, fill=lambda W: np.copyto(W, bits)
    )
    monkeypatch.setattr(exact, "guides", [guide])
    monkeypatch.setattr(exact, "no_repeat_ngram_size", 1)
    found = divergence.find_divergence(exact, TEXT[:3], [0, 4], [0, 11], Options(), 0)
    scores = exact.scores([*TEXT[:3], 0])
    check_gap(found, scores[[0, 4, 11]])
    assert text == [0]
