"""Other engines compared with this one: what is counted, what they are asked for, who is missing."""

import itertools
import sys

import pytest

import medusa_jax
from medusa_jax import Options, Tree, UserError
from medusa_jax.api import Model
from medusa_jax.evaluate.race import Contender, Run, ourselves, race
from medusa_jax.heads.registry import drafter_class, make_drafter
from research.peers import Setting, huggingface, llamacpp


def test_figures_are_medians_of_runs_made_in_turn():
    """Of 4 tokens one or two come with the first; the slow run of each prompt does not count."""
    calls = []

    def contender(name, tokens, seconds, first=1):
        lengths = itertools.cycle([seconds, 100 * seconds, seconds])

        def decode(prompt):
            calls.append((name, tuple(prompt)))
            if len(calls) <= 2:  # before anything counts
                return Run([tokens], 1e9, 1e9)
            return Run([tokens], 0.5, next(lengths), first)

        return Contender(name, decode, "float32")

    ours = contender("ours", [1, 2, 3, 4], 0.03)
    peer = contender("peer", [1, 2, 9, 4], 0.04, first=2)
    one, two = race([ours, peer], [[7], [8, 8]], 3)
    assert calls[:2] == [("ours", (7,)), ("peer", (7,))]
    in_turn = [("ours", "peer")] * 6
    names = [name for name, _ in calls[2:]]
    assert list(zip(names[::2], names[1::2])) == in_turn
    assert [p for _, p in calls[2:]] == [(7,)] * 6 + [(8, 8)] * 6
    assert one["tokens_per_second"] == pytest.approx(3 / 0.03)
    assert two["tokens_per_second"] == pytest.approx(2 / 0.04)
    assert one["prompt_tokens_per_second"] == pytest.approx(3 / 1.0)
    assert (one["speedup"], two["speedup"]) == pytest.approx((1, 0.5))
    assert (one["agreement"], two["agreement"]) == (1, 0.5)


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
