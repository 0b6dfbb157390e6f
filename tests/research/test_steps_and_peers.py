"""Single steps, other engines, DSpark's confidences and a first day on hardware."""

import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from children import environment
from tiny import write_model
from training_setup import ROOT

import medusa_jax
from medusa_jax import Options, UserError
from medusa_jax.api import Model
from medusa_jax.api.one_step import take_steps
from medusa_jax.evaluate.questions import DEMO_PROMPTS
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.tree.tree import Tree
from research import confidence, walk
from research.asking import questions_of
from research.hardware import summary
from research.hardware.record import Record, read_rows
from research.peers import Setting, huggingface, llamacpp


@pytest.mark.wide
def test_the_page_of_one_step_is_the_commands_output(capsys):
    assert walk.main(["--dtype", "float64"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "one_step.md").read_text()


@pytest.mark.wide
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_step_beyond_the_first_cache(tmp_path, monkeypatch, temperature):
    """Step 9 is the one that decoding takes, though the cache of the prompt is full long before."""
    monkeypatch.setattr(CpuKernels, "least_slots", 16)
    write_model(tmp_path)
    model = medusa_jax.load(str(tmp_path), str(tmp_path / "heads"), tree="chain:2")
    found = take_steps(model, "the cat", 9, temperature, seed=3)
    options = Options(max_new_tokens=40, temperature=temperature, seed=3)
    [result] = model.generate(["the cat"], options)
    *before, last = result.accepted_lengths[:9]
    n, accepted = 1 + sum(before), found["n"]
    assert (found["n_new"], accepted + 1) == (n, last)
    emitted = [*found["text"][:n], *found["emitted"][: accepted + 1]]
    assert emitted == result.token_ids[: n + last]
    assert [found["targets"][v] for v in found["path"][: accepted + 1]] == emitted[n:]


@pytest.mark.wide
def test_targets_are_those_of_the_adjusted_logits():
    """The demo bars repeated n-grams: here it may not continue with the token that it likes best."""
    model = medusa_jax.load(tree="chain:2")
    prompt = 2 * "x = [1, 2, 3, 4, 5, 6]\n" + "x = [1, 2, 3, 4"
    found = take_steps(model, prompt, 2)
    last = found["path"][found["n"]]
    assert model.no_repeat_ngram_size == 5
    assert found["targets"][last] == found["root"][1]


@pytest.mark.parametrize(
    ("peer", "model", "words"),
    [
        (llamacpp, "a.gguf", r"pip install 'medusa-jax\[llamacpp\]'"),
        (huggingface, "somewhere", r"pip install 'medusa-jax\[torch\]'"),
        (llamacpp, "some/directory", r"is not a GGUF file, which llama\.cpp needs"),
    ],
)
def test_what_is_missing_is_named(peer, model, words, monkeypatch):
    for name in ("llama_cpp", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=words):
        peer.contenders(Setting(model, 3, 40, 3, 0))


def test_plain_decoding_is_the_same_program_whatever_the_heads(directory):
    """Hydra++ has a layer that every accepted position goes through; plain decoding has not."""
    path = str(directory)
    model = medusa_jax.load(path, f"{path}/heads", tree="chain:1", dtype="float32")
    heads = drafter_class("hydrapp").Config(n_heads=2)
    other = Model(
        model.config,
        model.variables | {"heads": {"prefix": {}}},
        model.tokenizer,
        make_drafter(heads, model.config),
        dtype=model.dtype,
        mesh=model.mesh,
        tree="chain:1",
    )
    assert other.engine(tree="none") == model.engine(tree="none")
    assert other.engine(tree="chain:1").drafter is other.drafter


@pytest.mark.parametrize("model", [None, "another"])
def test_the_demo_s_prompts_are_ids_to_the_demo_alone(model):
    """Another model reads their texts with its own tokenizer."""
    flags = SimpleNamespace(questions=None, prompts=str(DEMO_PROMPTS), limit=3)
    questions = questions_of(flags, model)
    assert questions and all(("prompt_ids" in q) == (model is None) for q in questions)
    assert all(q["prompt"] for q in questions)


def test_a_signal_that_tells_right_guesses_reaches_the_bound_and_noise_gains_nothing():
    rng = np.random.default_rng(0)
    gain = [1 + np.stack([np.zeros(300), rng.integers(0, 2, 300)], 1) for _ in range(8)]
    told = [np.stack([own[:, 1:] - 1, rng.random((300, 1))], -1) for own in gain]
    found = confidence.compare(gain, told, np.array([1.0, 1.5]))
    # A right draft: 2 tokens in 1.5, a wrong one: 1 in 1, each time as good as it can be.
    assert found["confidences"] == pytest.approx(found["bound"], rel=1e-6)
    assert found["bound"] > 1.1 * found["one tree"]
    assert found["probabilities"] == pytest.approx(found["one tree"], rel=0.05)


def test_gains_follow_the_true_path():
    trees = [Tree.none(), Tree.from_choices([(0,), (0, 1)]), Tree.chain(2)]
    ranks_PK = np.array([[0, 1], [0, 2], [1, 0]])
    assert confidence.gains(ranks_PK, trees).tolist() == [[1, 3, 2], [1, 2, 2], [1, 1, 1]]


@pytest.mark.slow
def test_what_was_measured_survives_a_kill(tmp_path):
    words = f"-m research hardware --small --out={tmp_path} --parts=facts,steps".split()
    process = subprocess.Popen(
        [sys.executable, *words], env=environment(), stdout=subprocess.PIPE, text=True
    )
    while len(read_rows(tmp_path)) < 3:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    kept = read_rows(tmp_path)
    assert len(kept) >= 3 and kept[0]["what"] == "machine"
    assert "## Memory" in printed and (tmp_path / "summary.md").read_text() in printed
    time.sleep(2)
    assert read_rows(tmp_path) == kept  # no process of a part goes on


def test_a_cut_line_and_an_error_are_no_end(tmp_path):
    record = Record(tmp_path, "steps", 100, small=True)
    record.row("weights", gb_per_second=1.0)
    with record.trying("step", drafter="medusa", batch=1):
        raise ValueError("no | memory\nleft")
    with open(record.path, "a") as file:
        file.write('{"part": "steps", "wh')
    first, second = read_rows(tmp_path)
    assert first["gb_per_second"] == 1.0
    assert second["error"] == "ValueError: no | memory\nleft"
    text = " ".join(summary.write_summary(tmp_path).split())
    assert "| steps | step | medusa 1 | ValueError: no / memory left |" in text
