"""Drafted text is plain decoding's for the shape of every family, in float64."""

from itertools import product

import family
import pytest
from cases import thinned
from planted import PROMPTS, drafted, plain_texts, random_model, texts_of
from shapes import SHAPES, tiny_shape
from tiny import forward_logits

from medusa_jax.decoding import generate as loop
from medusa_jax.decoding.state import Engine
from medusa_jax.heads.drafter import Backbone
from medusa_jax.model.llama import Llama
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
DRAFTERS = {
    "medusa": Tree.cartesian([2, 2, 1]),
    "eagle3": Tree.cartesian([2, 2, 1]),
    "dspark": Tree.chain(3),
}
REQUEST = loop.DecodeRequest(PROMPTS, [24, 17, 29])


@pytest.mark.parametrize("shape", thinned(SHAPES, "olmo3", "gemma3"))
def test_plain_text_is_the_best_by_whole_passes_and_drafts_give_it(shape):
    config = tiny_shape(shape)
    model = random_model(config, 1)
    plain = plain_texts(config, model, REQUEST)
    for prompt, text in zip(PROMPTS, plain):
        logits = forward_logits(config, model[0], prompt + text)[len(prompt) - 1 : -1]
        assert logits.std() > 0.5 and logits.argmax(-1).tolist() == text
    assert (
        texts_of(drafted(config, model, REQUEST, plain, Tree.cartesian([2, 2, 1]), 1))
        == plain
    )


@pytest.mark.parametrize(
    ("shape", "name"),
    thinned(product(SHAPES, DRAFTERS), ("gemma3", "eagle3"), ("phi3", "dspark")),
)
def test_every_shape_with_drafters(shape, name):
    config = tiny_shape(shape)
    params, llama, prepared = random_model(config, 1)
    plain = plain_texts(config, (params, llama, prepared), REQUEST)
    stored = Backbone(Llama(config, llama.dtype), params)
    drafter, heads = family.drafter_of(family.small_heads(name, lm_head="own"), stored)
    engine = Engine(llama, drafter, DRAFTERS[name], "greedy")
    progress = loop.generate(engine, {"backbone": prepared, "heads": heads}, REQUEST)
    assert texts_of(progress) == plain
