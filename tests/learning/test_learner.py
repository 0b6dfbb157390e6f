"""Heads learn from answers in idle time; no text depends on it."""

import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from cases import thinned
from live import compilations
from served import ask_app, until
from tiny import tiny_arch, write_heads, write_model

import medusa_jax
from medusa_jax import Options
from medusa_jax.config import HeadsConfig
from medusa_jax.errors import UserError
from medusa_jax.evaluate.text_ranks import Text
from medusa_jax.heads.names import DRAFTERS
from medusa_jax.learning import kept, rule
from medusa_jax.learning.learner import LEAST_HELD, Learner
from medusa_jax.learning.windows import windows_of
from medusa_jax.serving import Request, Server
from medusa_jax.serving.http import make_app

PROMPTS = [f"{word} {letter}" for word in ("the", "in", "cat") for letter in "abcdefghij"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Heads of two kinds, at random, so that most of their guesses are wrong."""
    path = tmp_path_factory.mktemp("model")
    config, params = write_model(path, max_position=400)
    for name in DRAFTERS:
        heads = HeadsConfig(drafter=name, n_heads=3, n_layers=1, lm_head="shared")
        write_heads(path / name, config, params, heads, seed=1)
    return path


def load(path, name="medusa"):
    return medusa_jax.load(str(path), str(path / name), tree="chain:3")


def taught(model, directory, monkeypatch, n=30):
    """A learner that has seen answers to n prompts."""
    monkeypatch.setattr(rule, "RATE", 0.03)
    learner = Learner(model, str(directory))
    results = model.generate(PROMPTS[:n], Options(max_new_tokens=90))
    for prompt, result in zip(PROMPTS, results):
        learner.add(model.encode(prompt), result.token_ids)
    for worked in learner.work():
        if not worked:
            return learner


def same(model, options):
    return [(r.token_ids, r.steps) for r in model.generate(PROMPTS[:3], options)]


def test_drafts_get_better_and_texts_stay(path, tmp_path, monkeypatch):
    model = load(path)
    asked = Options(max_new_tokens=60), Options(max_new_tokens=60, temperature=0.9, seed=3)
    before = [same(model, options) for options in asked]
    learner = taught(model, tmp_path, monkeypatch)
    facts = learner.facts
    assert facts.answers == 30 and facts.steps > 20 and learner.in_use
    assert facts.after > 1.2 * facts.before
    with compilations() as compiled:
        after = [same(model, options) for options in asked]
    assert not compiled
    for old, new in zip(before, after):
        assert [ids for ids, _ in old] == [ids for ids, _ in new]
        assert sum(steps for _, steps in new) < sum(steps for _, steps in old)
    # Rules whose text would depend on it have the loaded heads.
    assert model.variables_by("typical")["heads"] is model.variables["heads"]

    later = Learner(load(path), str(tmp_path))
    assert later.in_use and later.facts == facts
    jax.tree.map(np.testing.assert_array_equal, later._rule.addition, learner._rule.addition)
    # An addition that does harm is not used, also at later starts.
    learner._rule.addition = jax.tree.map(lambda x: 30 * x + 3, learner._rule.addition)
    assert all(learner._test()) and learner.facts.after < learner.facts.before
    assert not learner.in_use and not Learner(load(path), str(tmp_path)).in_use
