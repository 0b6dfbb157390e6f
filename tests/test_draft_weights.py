"""In which type draft heads are stored: narrow where only speed depends on it, as wide as the weights
where the text does, or as was asked for."""

import pytest
from tiny import write_heads, write_model

import medusa_jax
from medusa_jax import Options
from medusa_jax.commands.decode_report import draft_weights
from medusa_jax.cpu.panels import Panels
from medusa_jax.heads.hydrapp import HydraPPConfig
from medusa_jax.model.stored import Codes
from medusa_jax.native import library
from medusa_jax.serving import Request, Server
from medusa_jax.tree.tree import Tree

native = pytest.mark.skipif(library() is None, reason="no C++ compiler")
TREE = Tree.cartesian([4, 3, 2])
PROMPT = [5, 9, 4, 7, 12, 6, 8, 10, 11, 5, 9, 4]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model with random Hydra++ heads, whose prefix layer keeps keys and values of the text."""
    path = tmp_path_factory.mktemp("model")
    config, params = write_model(path)
    write_heads(path / "heads", config, params, HydraPPConfig(n_heads=3), seed=1)
    return path


def read(directory, **more):
    form = {"dtype": "float32", "tree": TREE} | more
    return medusa_jax.load(str(directory), str(directory / "heads"), **form)


def kernel(variables):
    return variables["heads"]["heads_0"]["layers_0"]["linear"]["kernel"]


@native
@pytest.mark.wide
def test_a_server_gives_each_rule_its_heads(directory, monkeypatch):
    """And reuses no keys of the drafter's layers that the other heads made."""
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "native")
    model, options = read(directory), Options(20, 1.0, eos_ids=())
    prompt = PROMPT * 5
    wanted = {
        rule: model.generate([prompt], options, acceptance=rule)[0].draft_depths
        for rule in ("sampled", "typical")
    }
    with Server(model, slots=1) as server:
        before = None
        for rule in ("sampled", "typical", "typical", "sampled", "sampled"):
            *_, last = server.submit(Request(prompt, options, acceptance=rule))
            assert last.ending.result.draft_depths == wanted[rule], rule
            assert (last.ending.reused_tokens > 0) == (rule == before)
            before = rule


@pytest.mark.parametrize("products", ["plain", pytest.param("native", marks=native)])
def test_what_is_asked_for_holds_for_every_rule(products, directory, monkeypatch):
    """And steps have their own notes of times."""
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", products)
    marks = set()
    for number, asked in enumerate(("float32", "bfloat16", "int8")):
        model = read(directory, draft_weights=asked)
        form, bits = kernel(model.variables), (4, 2, 1)[number]
        if products == "native":
            assert isinstance(form, Panels) and form.form == asked
        else:
            assert isinstance(form, Codes) or form.dtype.itemsize == bits
        assert model.variables_by("typical") is model.variables
        kinds = {draft_weights(model, rule) for rule in ("auto", "greedy", "typical")}
        assert kinds == {asked}
        assert model.storage.weights == ""
        marks.add(model.trees.mark)
    assert len(marks) == 3
