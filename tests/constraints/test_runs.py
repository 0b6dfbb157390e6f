"""What a grammar forces, in the text's own form, and that the text is that of plain decoding."""

import json
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import tiny
from cases import wide
from guides import EOS, Rule, V
from planted import decoded, fresh_medusa, streamed, texts_of
from served import load_model
from tiny import tiny_arch

from medusa_jax import Options, Tree, UserError
from medusa_jax.constraints.child import grammar_of
from medusa_jax.constraints.grammars import BLANKS
from medusa_jax.constraints.runs import Layout, forced
from medusa_jax.decoding import constrained, generation
from medusa_jax.decoding.constrained import FEW, MANY, with_runs
from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.decoding.stopping import PAUSED
from medusa_jax.host_calls import HostFunction
from medusa_jax.native import asks, library

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


@pytest.fixture(autouse=True)
def _loops_call_the_host(monkeypatch):
    """Where there is a compiler; in float64 the products are XLA's anyway."""
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "")


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
    ("heads", "acceptance", "in_loops"),
    [(False, "sampled", True), *wide((False, "sampled", False), (False, "greedy", True))]
    + wide((True, "sampled", True), (True, "greedy", True), (True, "greedy", False)),
)
def test_texts_with_runs_are_those_of_plain_decoding(
    heads, acceptance, in_loops, monkeypatch
):
    """Long and short steps, rows of which one has no constraint."""
    if not in_loops:
        monkeypatch.setattr(constrained, "calls_host", lambda engine: False)
    config, lengths = tiny_arch(vocab_size=V, n_layers=1), np.zeros(MANY + 2, int)
    for seed in range(2):

        def texts(tree, heads=heads, seed=seed):
            engine, variables = fresh_medusa(config, tree, acceptance, seed=7)
            engine = with_runs(engine, heads)
            drawn = {"temperature": [0.8, 1.0, 0.0], "seed": [seed] * 3}
            request = DecodeRequest(
                [[4], [5, 6], [7, 8, 9]],
                [40, 30, 41],
                guides=[Rule(seed, forcing=0.8), None, Rule(seed + 9, dead=True)],
                ends=[(EOS,)] * 3,
                **(drawn if acceptance == "sampled" else {}),
            )
            progress = decoded(engine, variables, request)
            found = np.asarray(progress.histogram_BL).sum(0)
            return texts_of(progress), np.pad(found, (0, MANY + 2 - len(found)))

        expected, _ = texts(Tree.none())
        found, steps = texts(Tree.chain(2))
        assert found == expected
        lengths += steps
    longest = FEW if in_loops and asks() else FEW + 1
    assert lengths[longest:].sum() > 3  # forced runs, accepted whole


def request_of(guide, tokens=40):
    """An engine, its variables and a request of one row with a guide."""
    config = tiny_arch(vocab_size=V, n_layers=1)
    engine, variables = fresh_medusa(config, Tree.none(), seed=7)
    request = DecodeRequest([[4]], [tokens], guides=[guide], ends=[(EOS,)])
    return with_runs(engine, False), variables, request


called = pytest.mark.skipif(library() is None, reason="no C++ compiler")


@called
def test_a_loop_calls_the_host_and_gives_the_text_of_single_steps(monkeypatch):
    chunks = [*streamed(*request_of(Rule(1)))]
    monkeypatch.setattr(constrained, "calls_host", lambda engine: False)
    steps = [*streamed(*request_of(Rule(1)))]
    assert texts_of(chunks[-1]) == texts_of(steps[-1])
    assert len(chunks) < len(steps) / 4


@called
def test_a_failure_of_the_host_ends_the_loop_and_is_raised():
    class Costly(Rule):
        def advance(self, tokens):
            super().advance(tokens)
            if self.consumed > 9:
                raise UserError("too costly")

    with pytest.raises(UserError, match="too costly"):
        [*streamed(*request_of(Costly(1)))]
    assert not HostFunction.opened


@called
def test_a_closed_stream_lets_its_loop_end():
    """The loop is waiting for the host when its caller leaves."""
    guide, go_on = Rule(1), threading.Event()
    guide.fill = lambda into_W: go_on.wait(60) and Rule.fill(guide, into_W)
    engine, variables, request = request_of(guide)
    states, begun = [], generation.begin(engine, variables, request)
    chunks = constrained.stream(engine, variables, request, *begun, states.append)
    next(chunks)
    chunks.close()
    go_on.set()
    assert int(states[-1].status_B[0]) == PAUSED and guide.consumed <= 2


EXIT = """
import os, sys, time
import jax
os.environ["MEDUSA_JAX_PRODUCTS"] = ""
sys.path[:0] = {path}
from test_runs import *
jax.config.update("jax_enable_x64", True)
guide = Rule(1)
guide.fill = lambda into_W: time.sleep(0.3) or Rule.fill(guide, into_W)
chunks = streamed(*request_of(guide))
next(chunks)
print("ends")
"""


@called
@pytest.mark.wide
def test_python_may_end_while_a_loop_calls_it():
    script = EXIT.format(path=[path for path in sys.path if path])
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ends\n", "")


@pytest.mark.wide
@pytest.mark.parametrize("temperature", [*wide(0.0), 1.0])
def test_a_models_steps_choose_their_size(tmp_path, temperature):
    """By default nothing but the text and its grammar drafts."""
    tiny.write_model(tmp_path, characters=tiny.PRINTABLE, max_position=512)
    model = load_model(tmp_path, dtype="float64")
    model.trees, asked = replace(model.trees, chooses=True), {"json_schema": SCHEMA}
    options = Options(max_new_tokens=99, temperature=temperature, constraint=asked)
    [plain] = model.generate(["row = "], options, tree="none")
    for tree in (None, Tree.cartesian([2, 1])):
        [result] = model.generate(["row = "], options, tree=tree)
        assert result.token_ids == plain.token_ids
        assert max(result.draft_depths) <= (2 if tree else 0)
        assert result.steps < 0.8 * plain.steps and min(result.draft_depths) <= -FEW
