"""Heads learn from answers in idle time; no text depends on it."""

import itertools
import shutil
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from cases import wide
from live import compilations
from served import ask_app, until
from tiny import write_heads, write_model

import medusa_jax
from medusa_jax import Options
from medusa_jax.config import HeadsConfig
from medusa_jax.errors import UserError
from medusa_jax.evaluate.texts import Text
from medusa_jax.heads.names import DRAFTERS
from medusa_jax.learning import adapter, adapter_file
from medusa_jax.learning.learner import Learner
from medusa_jax.learning.moments import forgotten
from medusa_jax.learning.windows import ranks_in, windows_of
from medusa_jax.serving import Request, Server
from medusa_jax.serving.http import make_app

PROMPTS = [f"{word} {letter}" for word in ("the", "in", "cat") for letter in "abcdefghij"]
GREEDY = Options(max_new_tokens=90)
SAMPLED = Options(max_new_tokens=90, temperature=0.9, seed=3)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    counted = np.repeat([0, 1, 0, 1, 0, 1], [4, 30, 2, 4, 5, 15]).astype(bool)
    texts = {"tokens": np.arange(60, dtype=np.uint16) % 30 + 3, "lengths": [40, 20]}
    np.savez_compressed(path / "rehearsal.npz", counted=counted, **texts)
    return path, *write_model(path, max_position=400)


def load(made, name="medusa"):
    """A model with heads at random, most of whose guesses are wrong."""
    path, *base = made
    heads = HeadsConfig(drafter=name, n_heads=3, n_layers=1, lm_head="shared")
    write_heads(path / name, *base, heads, seed=1)
    return medusa_jax.load(str(path), str(path / name), tree="chain:3")


def test_drafts_get_better_and_texts_stay(made, tmp_path, monkeypatch):
    monkeypatch.setattr(adapter, "RATE", 0.03)
    model = load(made)
    learner = Learner(model, str(tmp_path))
    before = [model.generate(PROMPTS, options) for options in (GREEDY, SAMPLED)]
    for prompt, result in zip(PROMPTS, before[0]):
        learner.add(model.encode(prompt), result.token_ids)
    assert all(itertools.takewhile(bool, learner.work()))
    facts = learner.facts
    assert (facts["answers"], facts["steps"]) == (30, 27 * adapter.STEPS)
    assert facts["after"] > 1.2 * facts["before"] > 1 and model.learned
    with compilations() as compiled:
        after = [model.generate(PROMPTS, options) for options in (GREEDY, SAMPLED)]
    assert not compiled
    for old, new in zip(before, after):
        assert [r.token_ids for r in old] == [r.token_ids for r in new]
        assert sum(r.steps for r in new) < sum(r.steps for r in old)
    # Rules whose text would depend on it have the loaded heads.
    assert model.variables_by("typical")["heads"] is model.variables["heads"]

    learner.close()
    later = Learner(load(made), str(tmp_path))
    assert later._model.learned and later.facts == facts
    later.close()
    jax.tree.map(
        np.testing.assert_array_equal, later.adapter.factors, learner.adapter.factors
    )
    # An adapter that does harm, as it would to heads that guess as well already, is not used; nor at later starts.
    held = [
        (window, ranks_in(model, model.learned["heads"], window))
        for window, _ in learner._held
    ]
    learner._held.extend(held)
    learner.adapter.begin(jax.tree.map(np.zeros_like, learner.adapter.factors))
    assert all(learner._test()) and 1 < facts["after"] < facts["before"]
    assert not model.learned and not Learner(load(made), str(tmp_path))._model.learned


def test_broken_gradients_and_heads(made, tmp_path, monkeypatch):
    """A step without a finite gradient is none; heads whose scores are no numbers are not used."""
    learner = Learner(load(made), str(tmp_path))
    trained, backward = learner.adapter, learner.adapter._backward
    for prompt in PROMPTS[:10]:
        learner.add([*prompt.encode()], list(range(3, 30)) * 4)
    with monkeypatch.context() as patch:
        patch.setattr(
            trained,
            "_backward",
            lambda pullback: jax.tree.map(lambda x: x * np.nan, backward(pullback)),
        )
        assert all(itertools.takewhile(bool, learner.work()))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(trained.factors))
    trained.begin(jax.tree.map(lambda x: x * np.nan, trained.factors))
    assert (
        all(learner._test()) and learner.facts["after"] == 1 and not learner._model.learned
    )


def test_sessions_too_short_for_a_test_go_on(made, tmp_path):
    """Counts and what was learned are kept; the tenth answer is held out and tested with at once; answers too short
    for a window teach nothing."""
    taught = []
    for lengths in ([300] * 6, [300] * 4, [3, 3, 3, 300]):
        learner = Learner(load(made), str(tmp_path))
        steps = learner.facts["steps"]
        for length in lengths:
            learner.add([3, 4], ([*range(3, 30)] * 12)[:length])
        assert all(itertools.takewhile(bool, learner.work()))
        learner.start(lambda: True)
        assert learner.close()
        taught.append((learner.facts["steps"] - steps, learner.facts["after"] > 0))
    S = adapter.STEPS
    assert taught == [(6 * S, False), (3 * S, True), (S, True)]
    assert learner.facts["answers"] == 14


@pytest.mark.parametrize("name", wide(*sorted(DRAFTERS)))
def test_every_kind_of_heads_learns(made, name):
    """The adapter starts at zero. Training changes it for every kernel, and lowers the loss of the heads with it."""
    model = load(made, name)
    learning, loaded = adapter.Adapter(model), model.variables["heads"]
    jax.tree.map(np.testing.assert_array_equal, learning.adapted_heads(), loaded)
    found = [(len(ids), ids[0], n_prompt) for ids, n_prompt in learning.rehearsal]
    assert found == [(34, 3, 4), (20, 13, 5)]
    reading = windows_of(model, Text([*range(3, 30)] * 12, 3))
    with pytest.raises(StopIteration) as read:
        while next(reading):
            pass
    window = read.value.value[0]
    assert [w.counted_1W.sum() for w in read.value.value] == [253, 68]
    losses = []
    for _ in range(4 * adapter.WINDOWS):
        assert all(learning.add(window))
        if len(losses) % adapter.WINDOWS == adapter.WINDOWS - 1:
            learning.step()
        parts = learning.factors, learning.heads, learning._frozen, window
        losses.append(float(learning._adapted_sum(*parts)))
    assert losses[-1] < losses[0] and all(map(np.any, jax.tree.leaves(learning.factors)))
    merged = adapter.merged(learning.factors, learning.heads)
    expected = learning._sum(merged, learning._frozen, window)
    np.testing.assert_allclose(losses[-1], expected, rtol=1e-5)
    assert all(learning.remember(window))
    assert all(map(np.any, jax.tree.leaves(learning._moments)))
    learning.begin(learning._trained)
    lost = []
    for _ in range(adapter.WARM_UP):  # with nothing to learn, it goes back to what was
        learning._learned = 1
        learning.step()
        lost.append(float(forgotten(learning._trained, learning._moments, 253, 1.0)))
    assert 0 < lost[-1] < lost[0]


def test_what_is_refused(made, tmp_path):
    learner = Learner(load(made), str(tmp_path))
    with pytest.raises(UserError, match="in use by another process"):
        Learner(load(made), str(tmp_path))
    learner.close()
    with pytest.raises(UserError, match="cannot be written"):
        Learner(load(made), str(learner._file / "below"))
    with pytest.raises(UserError, match=r"^'' cannot be written to: No such file"):
        Learner(load(made), "")
    with pytest.raises(UserError, match="belongs to other heads"):
        Learner(load(made, "hydra"), str(tmp_path))
    learner._file.write_bytes(learner._file.read_bytes()[:-4])
    with pytest.raises(UserError, match="cannot be read"):
        Learner(load(made), str(tmp_path))
    for damage in (b"PK", (made[0] / "rehearsal.npz").read_bytes()[:-9]):
        (tmp_path / "rehearsal.npz").write_bytes(damage)
        with pytest.raises(UserError, match=r"rehearsal\.npz cannot be read"):
            adapter.read_rehearsal(str(tmp_path / "heads"), 99)
    shutil.copy(made[0] / "rehearsal.npz", tmp_path)
    with pytest.raises(UserError, match="another tokenizer"):
        adapter.read_rehearsal(str(tmp_path / "heads"), 20)
    lookup = medusa_jax.load(str(made[0]), "prompt_lookup")
    with pytest.raises(UserError, match="trained draft heads on one device"):
        Learner(lookup, str(tmp_path / "new"))


def test_an_adapter_without_facts(made, tmp_path):
    learner = Learner(load(made), str(tmp_path))
    learner.close()
    adapter_file.save(learner._file, learner.adapter.factors, {}, learner._mark)
    again = Learner(load(made), str(tmp_path))
    assert again.facts == dict.fromkeys(("answers", "steps", "before", "after"), 0)
    again.close()


KILLED = """
import os, sys
from pathlib import Path
import numpy as np
from medusa_jax.learning.adapter_file import save
replace = os.replace
for n in range(2):
    save(Path(sys.argv[1]), {"a": np.full(3, n, np.float32)}, {"a": n}, np.arange(4))
    os.replace = lambda *_: os.kill(os.getpid(), 9)
"""


def test_a_kill_while_saving_leaves_what_was_there(tmp_path):
    file = tmp_path / "learned" / "adapter.safetensors"
    done = subprocess.run([sys.executable, "-c", KILLED, str(file)])
    assert done.returncode == -9
    factors, _ = adapter_file.read(file, {"a": np.ones(3)}, np.arange(4))
    assert factors["a"].tolist() == [0, 0, 0]


def test_a_request_never_waits_for_more_than_a_unit(made, tmp_path, monkeypatch):
    """A unit of work that has begun runs next to it, another does not begin."""
    model = load(made)
    learner = Learner(model, str(tmp_path))
    began, go_on, at_once = [], threading.Semaphore(0), threading.Event()

    def work():
        while True:
            began.append(learner.facts["answers"])
            at_once.is_set() or go_on.acquire()
            yield True

    monkeypatch.setattr(learner, "work", work)
    request = Request("the cat", Options(max_new_tokens=30))
    with Server(model, slots=1, learner=learner) as server:
        [*_, last] = server.submit(request)  # while a unit is blocked
        assert last.ending.result.new_tokens == 30 and began == [0]
        turn, held = server._scheduler.step, threading.Event()
        monkeypatch.setattr(server._scheduler, "step", lambda: held.wait() and turn())
        deltas = server.submit(request)
        go_on.release(3)
        time.sleep(0.3)
        assert began == [0]
        held.set()
        assert [*deltas][-1].ending
        until(lambda: len(began) == 4)
        shown = ask_app(make_app(server, name="tiny", template=""), "GET", "/metrics").text
        for fact in ("answers 2.0", "steps 0.0", "after 0.0", "in_use 0.0"):
            assert f"medusa_learning_{fact}" in shown
        at_once.set()
        go_on.release()
    assert not learner._thread.is_alive()
