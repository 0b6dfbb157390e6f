"""Drafters without heads by what `--drafter` says of them, from files."""

import pytest
from tiny import write_model

from medusa_jax.api import Options, load
from medusa_jax.api.baselines import find_baseline
from medusa_jax.errors import UserError
from medusa_jax.heads.prompt_lookup import PromptLookupConfig
from medusa_jax.tree import Tree

PROMPTS = ["the cat in the ha", "a b c a b c a"]
OPTIONS = Options(max_new_tokens=21, eos_ids=())


@pytest.mark.wide
@pytest.mark.usefixtures("x64")
def test_the_text_is_that_of_plain_decoding(directory):
    """A draft model that is the model itself is always right: five tokens in each of four steps."""
    directory = str(directory)
    model = load(directory, f"draft_model:{directory}", dtype="float64")
    assert model.drafts and model.tree == Tree.chain(4)
    plain = [r.token_ids for r in model.generate(PROMPTS, OPTIONS, tree="none")]
    drafted = model.generate(PROMPTS, OPTIONS)
    assert [r.token_ids for r in drafted] == plain
    assert [r.steps for r in drafted] == [4, 4]
    model = load(directory, "lookahead:window=3:ngram=3:guesses=2", dtype="float64")
    assert model.tree == Tree.from_choices([[0], [1], [0, 0], [1, 0]])
    assert [r.token_ids for r in model.generate(PROMPTS, OPTIONS)] == plain


def test_a_draft_model_needs_the_same_tokenizer(directory, tmp_path):
    """As many tokens, of which one is another."""
    write_model(tmp_path)
    file = tmp_path / "tokenizer.json"
    swapped = file.read_text().replace('"e":', '"#":').replace('"d":', '"e":')
    file.write_text(swapped.replace('"#":', '"d":'))
    with pytest.raises(UserError, match="has another tokenizer than the model"):
        load(str(directory), f"draft_model:{tmp_path}")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("draft_model", "--drafter draft_model:PATH"),
        ("draft_model:", "--drafter draft_model:PATH"),
        ("lookahead:windows=3", "the fields guesses, ngram, window, not 'windows=3'"),
        ("prompt_lookup:ngram=two", "the fields matches, ngram, tokens, not 'ngram=two'"),
        ("prompt_lookup:ngram=0", "ngram is at least 1, not 0"),
    ],
)
def test_bad_specs(spec, message, directory):
    with pytest.raises(UserError, match=message):
        load(str(directory), spec)


def test_what_a_name_says():
    found = find_baseline("prompt_lookup:ngram=2:tokens=3")
    assert found is not None and found.config == PromptLookupConfig(ngram=2, tokens=3)
    assert find_baseline("hydra") is None and find_baseline("some/directory") is None
