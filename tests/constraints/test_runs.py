"""What a grammar forces, in the text's own form, and that the text is that of plain decoding."""

import json

import numpy as np
import pytest
import tiny
from cases import wide
from guides import EOS, Rule, V
from planted import decoded, fresh_medusa, texts_of
from served import load_model
from tiny import tiny_arch

from medusa_jax import Options, Tree
from medusa_jax.constraints.child import grammar_of
from medusa_jax.constraints.grammars import BLANKS
from medusa_jax.constraints.runs import Layout, forced
from medusa_jax.decoding import generate as loop
from medusa_jax.decoding.constrained import FEW, MANY, with_runs

guidance = pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("x64")
TAGS = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}
PERSON = {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": TAGS}
SCHEMA = {
    "type": "object",
    "properties": PERSON,
    "required": [*PERSON],
    "additionalProperties": False,
}
PRETTY = '{\n  "name": "A",\n  "age": 3,\n  "tags": [\n    "x'
BYTES = {byte: byte for byte in range(256)}


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("", '{"name": "'),  # the form of most models
        ('{"name":"Ann",', ' "age":'),
        ('{"name": "A",\n  "age', '": '),
        ("{\n ", ' "name": "'),
        ('{\n  "name": "A",', '\n  "age": '),
        (PRETTY + '",', '\n    "'),
        (PRETTY + '",\n    "y"', "\n  ]\n}"),
        ('{"name": "a, b', ""),
        ('{"name": "a\\"', ""),
    ],
)
def test_a_run_has_the_blanks_of_the_text(text, run):
    grammar = grammar_of(guidance, "json_schema", json.dumps(SCHEMA), BLANKS)
    matcher, layout = guidance.LLMatcher(guidance.LLTokenizer("byte"), grammar), Layout()
    assert matcher.consume_tokens(list(text.encode()))
    layout.read(text.encode())
    for _ in range(2):  # it changes neither
        assert forced(matcher, layout, BYTES).decode() == run


@pytest.mark.parametrize(
    ("heads", "acceptance"),
    [(False, "sampled"), *wide((False, "greedy"), (True, "sampled"), (True, "greedy"))],
)
def test_texts_with_runs_are_those_of_plain_decoding(heads, acceptance):
    """Long and short steps, rows of which one has no constraint."""
    config, lengths = tiny_arch(vocab_size=V, n_layers=1), np.zeros(MANY + 2, int)
    for seed in range(2):

        def texts(tree, heads=heads, seed=seed):
            engine, variables = fresh_medusa(config, tree, acceptance, seed=7)
            engine = with_runs(engine, heads)
            drawn = {"temperature": [0.8, 1.0, 0.0], "seed": [seed] * 3}
            request = loop.DecodeRequest(
                [[4], [5, 6], [7, 8, 9]],
                [40, 30, 41],
                guides=[Rule(seed, forcing=0.8), None, Rule(seed + 9, dead=True)],
                stops=[((EOS,),)] * 3,
                **(drawn if acceptance == "sampled" else {}),
            )
            progress = decoded(engine, variables, request)
            found = np.asarray(progress.histogram_BL).sum(0)
            return texts_of(progress), np.pad(found, (0, MANY + 2 - len(found)))

        expected, _ = texts(Tree.none())
        found, steps = texts(Tree.chain(2))
        assert found == expected
        lengths += steps
    assert lengths[FEW + 1 :].sum() > 3  # forced runs, accepted whole


def test_a_models_steps_choose_their_size(tmp_path):
    """By default nothing but the text and its grammar drafts."""
    tiny.write_model(tmp_path, characters=tiny.PRINTABLE, max_position=512)
    model = load_model(tmp_path, dtype="float64")
    model.chooses, asked = True, {"json_schema": SCHEMA}
    for temperature in (0.0, 1.0):
        options = Options(max_new_tokens=99, temperature=temperature, constraint=asked)
        [plain] = model.generate(["row = "], options, tree="none")
        for tree in (None, Tree.cartesian([2, 1])):
            [result] = model.generate(["row = "], options, tree=tree)
            assert result.token_ids == plain.token_ids
            assert max(result.draft_depths) <= (2 if tree else 0)
            assert result.steps < 0.8 * plain.steps and min(result.draft_depths) < -FEW
