"""Other engines compared with this one: what is counted, what they are asked for, who is missing."""

import sys

import pytest

import medusa_jax
from medusa_jax import Options, Tree, UserError
from medusa_jax.api import Model
from medusa_jax.evaluate.race import ourselves
from medusa_jax.heads.registry import drafter_class, make_drafter
from research.peers import Setting, huggingface, llamacpp


@pytest.fixture(scope="module")
def model(directory):
    heads = str(directory / "heads")
    return medusa_jax.load(str(directory), heads, tree="chain:1", dtype="float32")


def test_this_engine_decodes_on_after_an_end_of_text(model, monkeypatch):
    """With every token an end of text, all that were asked for come, drafted and plain."""
    monkeypatch.setattr(model, "eos_ids", tuple(range(model.config.vocab_size)))
    options = Options(max_new_tokens=9, eos_ids=())
    plain, drafted = (ourselves(model, t, options) for t in (Tree.none(), Tree.chain(1)))
    assert (plain.label, plain.weights) == ("plain", "float32")
    assert (drafted.label, drafted.facts["tree_nodes"]) == ("medusa", 2)
    runs = [contender.decode([4, 5, 6]) for contender in (plain, drafted)]
    assert runs[0].tokens == 8 and runs[0].texts == runs[1].texts


def test_what_is_not_there_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"pip install 'medusa-jax\[llamacpp\]'"):
        llamacpp.contenders(Setting("a.gguf", 3, 40, 3, 0))
    with pytest.raises(UserError, match=r"pip install 'medusa-jax\[torch\]'"):
        huggingface.contenders(Setting("somewhere", 6, 40, 2, 0))
    for model in (None, "some/directory"):
        with pytest.raises(UserError, match=r"is no GGUF file, which llama\.cpp needs"):
            llamacpp.contenders(Setting(model, 3, 40, 3, 0))


def test_plain_decoding_is_the_same_program_whatever_the_heads(model):
    """Hydra++ has a layer that every accepted position goes through; plain decoding has not."""
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
