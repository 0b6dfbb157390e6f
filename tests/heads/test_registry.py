"""Drafters from outside the package: by `module:Class`, by entry point, and what a file may name."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest
from tiny import tiny_arch

from medusa_jax.arch import HeadsConfig
from medusa_jax.errors import UserError
from medusa_jax.files.layouts import native_heads
from medusa_jax.heads import registry
from medusa_jax.heads.names import BASELINES, DRAFTERS, split_drafter
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.llama import Llama, init_params

TINY = "examples.tiny_drafter:Tiny"
CONFIG = tiny_arch()


def test_every_name_of_the_package_is_a_drafter():
    for name in DRAFTERS | BASELINES:
        kind = registry.drafter_class(name)
        assert kind.trained == (name in DRAFTERS) != registry.is_baseline(name)
        if name != "medusa":
            assert kind.Config().drafter == name


@pytest.mark.parametrize(
    ("given", "name", "rest"),
    [
        ("hydra", "hydra", ""),
        ("prompt_lookup:tokens=4:ngram=2", "prompt_lookup", "tokens=4:ngram=2"),
        ("draft_model:some/where", "draft_model", "some/where"),
        (TINY, TINY, ""),
        (f"{TINY}:work/heads:1", TINY, "work/heads:1"),
        ("path/to/heads", "path/to/heads", ""),
    ],
)
def test_a_name_and_the_rest(given, name, rest):
    assert split_drafter(given) == (name, rest)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hydar", "did you mean 'hydra'"),
        ("no_such_module:Tiny", "cannot be imported: No module named 'no_such_module'"),
        ("os:getcwd", "'os:getcwd' is not a class of drafters"),
        ("examples.tiny_drafter:Tyni", "is not a class of drafters"),
    ],
)
def test_names_that_are_no_drafter(name, message):
    with pytest.raises(UserError, match=message):
        registry.drafter_class(name)


def test_an_entry_point_gives_a_class_a_short_name(monkeypatch):
    monkeypatch.setattr(registry, "installed", lambda: {"tiny": TINY, "hydra": "os:getcwd"})
    assert registry.drafter_class("tiny").__name__ == "Tiny"
    assert registry.drafter_class("hydra").__name__ == "Hydra"
    assert registry.make_drafter(HeadsConfig(drafter="tiny"), CONFIG).name == "tiny"
    with pytest.raises(UserError, match="did you mean 'tiny'"):
        registry.drafter_class("tinny")


def test_a_file_does_not_choose_code_to_import(tmp_path, monkeypatch):
    (tmp_path / "strange.py").write_text("from examples.tiny_drafter import Tiny\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "strange", raising=False)
    drafter = registry.make_drafter(HeadsConfig(drafter=TINY), CONFIG)
    backbone = Backbone(Llama(CONFIG), init_params(CONFIG, jax.random.key(0)))
    params = jax.tree.map(np.asarray, drafter.init(jax.random.key(1), backbone))
    heads = dataclasses.replace(drafter.heads, drafter="strange:Tiny")
    base = {"d_model": CONFIG.d_model, "vocab_size": CONFIG.vocab_size, "fingerprint": "x"}
    native_heads.save_heads(str(tmp_path), heads, params, base=base, recipe={})
    with pytest.raises(
        UserError, match=r"is not imported: give --drafter strange:Tiny:PATH"
    ):
        native_heads.open_native(str(tmp_path))
    assert "strange" not in sys.modules
    registry.drafter_class("strange:Tiny")  # the user named it
    assert native_heads.open_native(str(tmp_path)).heads == heads
    file = tmp_path / "heads.json"
    described = json.loads(file.read_text())
    described["heads"]["drafter"] = "os:getcwd"
    file.write_text(json.dumps(described))
    with pytest.raises(UserError, match="is not a class of drafters"):
        native_heads.open_native(str(tmp_path))


def test_a_config_that_cannot_be_hashed_is_refused(monkeypatch, tmp_path):
    """`jit` takes the drafter, and so its Config, as a static argument."""
    (tmp_path / "plain_config.py").write_text(
        "from dataclasses import dataclass\n"
        "from examples.tiny_drafter import Tiny\n"
        "from medusa_jax.arch import HeadsConfig\n\n"
        "@dataclass\n"
        "class Config(HeadsConfig):\n    gated: bool = True\n\n"
        "class Plain(Tiny):\n    Config = Config\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="unsafe_hash=True"):
        registry.drafter_class("plain_config:Plain")
