"""Other engines compared with this one: what is counted, what they are asked for, who is missing."""

import sys
from types import SimpleNamespace

import pytest

import medusa_jax
from medusa_jax import UserError
from medusa_jax.api import Model
from medusa_jax.evaluate.questions import DEMO_PROMPTS
from medusa_jax.heads.registry import drafter_class, make_drafter
from research.asking import questions_of
from research.peers import Setting, huggingface, llamacpp


@pytest.mark.parametrize(
    ("peer", "model", "words"),
    [
        (llamacpp, "a.gguf", r"pip install 'medusa-jax\[llamacpp\]'"),
        (huggingface, "somewhere", r"pip install 'medusa-jax\[torch\]'"),
        (llamacpp, "some/directory", r"is no GGUF file, which llama\.cpp needs"),
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
