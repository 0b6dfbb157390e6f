"""The first command of the README, up to what it would run, on every platform."""

import jax
import pytest
from cases import thinned

from medusa_jax import Options, load
from medusa_jax.api import DEMO
from medusa_jax.decoding import generate as loop

DRAFTERS = sorted(file.parent.name for file in DEMO.glob("*/heads.json"))


@pytest.mark.parametrize(
    ("platform", "drafter"),
    thinned(
        [("cpu", "hydra"), ("tpu", "hydra"), *(("gpu", drafter) for drafter in DRAFTERS)],
        ("cpu", "hydra"),
        ("gpu", "hydrapp"),
        ("gpu", "medusa"),
    ),
)
def test_the_demo_traces_with_its_tree_and_type(platform, drafter, monkeypatch):
    """Tracing meets every shape of the prefill and the loop."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    model = load(drafter=drafter)
    _, engine, request = model.plan(["def parse("], Options(), None, {})

    def run(variables):
        state, _ = loop.begin(engine, variables, request)
        return loop.decode_loop(engine, variables, state, 1)

    jax.eval_shape(run, model.variables)
    assert (engine.tree.n_nodes == 64) == (platform != "cpu")
    assert 1 < engine.tree.path_length <= model.drafter.n_heads + 1
    assert model.dtype == ("float32" if platform == "cpu" else "bfloat16")
