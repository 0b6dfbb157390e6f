"""An addition touches one new file, which is found by its place."""

import importlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from planted import texts_of
from tiny import decoder, random_params, tiny_arch

from medusa_jax import __main__, heads
from medusa_jax.config import HeadsConfig
from medusa_jax.decoding import acceptance
from medusa_jax.decoding import generate as loop
from medusa_jax.heads import Backbone
from medusa_jax.model.llama import Llama
from medusa_jax.tree import Tree

RULE = '''
import jax.numpy as jnp

from medusa_jax.decoding.acceptance.rule import Accepted, Rule
from medusa_jax.decoding.acceptance.targets import target_tokens


def nothing(v):
    """No draft is ever accepted: plain greedy decoding, at the price of a tree."""
    targets_BM = target_tokens(v.logits_BMV, v.positions_BM, None)
    B, L = v.nodes_BM.shape[0], v.tree.path_length
    return Accepted(jnp.zeros((B, L), "int32"), jnp.zeros(B, "int32"), targets_BM[:, 0])


NOTHING = Rule("nothing", True, "lossless: accepts nothing", nothing)
'''
DRAFTER = '''
from medusa_jax.heads.medusa import Medusa


class Backwards(Medusa):
    """Medusa's heads in the other order."""

    name = "backwards"

    def head_logits(self, params, backbone, k, features):
        return super().head_logits(params, backbone, self.n_heads - 1 - k, features)
'''


@pytest.fixture
def added(tmp_path, monkeypatch):
    """Put one file into a room."""

    def add(room, name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setattr(room, "__path__", [*room.__path__, str(tmp_path)])
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, f"{room.__name__}.{name}", raising=False)

    return add


@pytest.mark.wide
@pytest.mark.usefixtures("x64")
def test_an_acceptance_rule_is_one_file(added, monkeypatch):
    added(acceptance, "nothing", RULE)
    found = acceptance._find()
    assert set(found) - set(acceptance.RULES) == {"nothing"}
    monkeypatch.setitem(acceptance.RULES, "nothing", found["nothing"])
    config = tiny_arch(vocab_size=7)
    llama, params = decoder(config, random_params(config, 1))
    drafter = heads.make_drafter(HeadsConfig(n_heads=2, lm_head="shared"), config)
    variables = {
        "backbone": params,
        "heads": drafter.init(jnp.zeros(2, jnp.uint32), Backbone(Llama(config), params)),
    }
    texts = {}
    for rule, tree in (("greedy", Tree.none()), ("nothing", Tree.chain(2))):
        engine = loop.Engine(llama, drafter, tree, rule)
        progress = loop.generate(engine, variables, loop.Request([[1, 2, 3]], [12]))
        texts[rule] = texts_of(progress)
        assert np.asarray(progress.steps_B).tolist() == [11]
    assert texts["nothing"] == texts["greedy"]


def test_a_drafter_is_one_file(added):
    added(heads, "backwards", DRAFTER)
    found = heads._find()
    assert set(found) - {*heads.DRAFTERS, *heads.BASELINES} == {"backwards"}


def test_a_command_is_a_file_and_a_line(monkeypatch, capsys):
    module = type(sys)("medusa_jax.commands.hello")
    module.main = lambda argv: print("hello", *argv) or 0
    monkeypatch.setitem(sys.modules, "medusa_jax.commands.hello", module)
    monkeypatch.setitem(
        __main__.COMMANDS, "hello", __main__.Command("use", module.__name__, "greets")
    )
    assert __main__.main(["hello", "there"]) == 0
    assert __main__.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("hello there") and "greets" in said
