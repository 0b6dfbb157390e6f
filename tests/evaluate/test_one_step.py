"""One step, part by part, is the step that decoding takes."""

import pytest
from tiny import write_model

import medusa_jax
from medusa_jax import Options
from medusa_jax.api import Model
from medusa_jax.api.form import Form
from medusa_jax.api.loaded_drafter import LoadedDrafter
from medusa_jax.api.tree_choice import TreeChoice
from medusa_jax.evaluate.one_step import take_steps
from medusa_jax.heads.registry import drafter_class, make_drafter


@pytest.mark.wide
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_step_beyond_the_first_cache(tmp_path, monkeypatch, temperature):
    """Step 9 is the one that decoding takes, though the cache of the prompt is full long before."""
    write_model(tmp_path)
    model = medusa_jax.load(str(tmp_path), str(tmp_path / "heads"), tree="chain:2")
    monkeypatch.setattr(type(model.llama.kernels), "least_slots", 16)
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


def test_plain_decoding_is_the_same_program_whatever_the_heads(directory):
    """Hydra++ has a layer that every accepted position goes through; plain decoding has not."""
    path = str(directory)
    model = medusa_jax.load(path, f"{path}/heads", tree="chain:1", dtype="float32")
    heads = drafter_class("hydrapp").Config(n_heads=2)
    other = Model(
        model.config,
        model.variables["backbone"],
        LoadedDrafter(make_drafter(heads, model.config), {"prefix": {}}),
        model.tokenizer,
        Form("float32", model.dtype, model.storage, model.llama.kernels),
        model.mesh,
        TreeChoice(model.tree),
    )
    assert other.engine(tree="none") == model.engine(tree="none")
    assert other.engine(tree="chain:1").drafter is other.drafter
