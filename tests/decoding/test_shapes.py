"""Drafted text is plain decoding's for the shape of every family, in float64."""

from itertools import product

import family
import pytest
from cases import thinned, wide
from children import devices, printed_by
from planted import PROMPTS, decoded, drafted, plain_texts, random_model, texts_of
from shapes import SHAPES, tiny_shape
from tiny import forward_logits, write_model

from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.decoding.state import Engine
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.llama import Llama
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")
DRAFTERS = {
    "medusa": Tree.cartesian([2, 2, 1]),
    "eagle3": Tree.cartesian([2, 2, 1]),
    "dspark": Tree.chain(3),
}
REQUEST = DecodeRequest(PROMPTS, [24, 17, 29])
ON_MESHES = r"""
import json, sys
import jax
jax.config.update("jax_enable_x64", True)
import medusa_jax
from medusa_jax import Options

texts = {}
for mesh in ((1, 1, 1), (1, 1, 2), (2, 1, 2)):
    form = {"tree": "cartesian:2,2,1", "dtype": "float64", "mesh": mesh}
    model = medusa_jax.load(sys.argv[1], sys.argv[1] + "/heads", **form)
    for tree in ("none", None):
        prompts = ["the cat", "a", "cab and", "in"]
        options = [Options(30, t, seed=2, eos_ids=()) for t in (0.0, 0.0, 1.0, 0.8)]
        results = model.generate(prompts, options, tree=tree)
        texts[f"{mesh} {tree}"] = [r.token_ids for r in results]
print(json.dumps([texts, any(any(r.draft_depths) for r in results)]))
"""


@pytest.mark.parametrize("shape", wide(*SHAPES))
def test_every_shape_over_tensor_shards(shape, tmp_path):
    """Plain and drafted text of one device."""
    fields = SHAPES[shape] | {"max_position": 512, "tie_embeddings": False}
    write_model(tmp_path, n_layers=2, **fields)
    texts, accepted = printed_by(ON_MESHES, tmp_path, xla_flags=devices(4))
    expected = texts["(1, 1, 1) none"]
    assert texts == dict.fromkeys(texts, expected) and len(texts) == 6
    assert accepted and len({*expected[2]}) > 3


@pytest.mark.parametrize("shape", thinned(SHAPES, "gemma3"))
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
    ("shape", "name"), thinned(product(SHAPES, DRAFTERS), ("phi3", "dspark"))
)
def test_every_shape_with_drafters(shape, name):
    config = tiny_shape(shape)
    params, llama, prepared = random_model(config, 1)
    plain = plain_texts(config, (params, llama, prepared), REQUEST)
    stored = Backbone(Llama(config, llama.dtype), params)
    drafter, heads = family.drafter_of(family.small_heads(name, lm_head="own"), stored)
    engine = Engine(llama, drafter, DRAFTERS[name], "greedy")
    progress = decoded(engine, {"backbone": prepared, "heads": heads}, REQUEST)
    assert texts_of(progress) == plain
