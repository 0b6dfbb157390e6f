"""The first command of the README, up to what it would run, on every platform."""

import jax
import pytest
from cases import thinned

from medusa_jax.api import DEMO, Model
from medusa_jax.commands.decode import main
from medusa_jax.decoding import generate as loop

DRAFTERS = sorted(file.parent.name for file in DEMO.glob("*/heads.json"))


@pytest.fixture
def traced(monkeypatch):
    """Compiling and decoding are replaced by tracing, which meets every shape; engines seen."""
    engines = []

    def trace(self, prompts, options, ids=None, **engine_options):
        _, engine, request = self.plan(prompts, options, ids, engine_options)
        engines.append((engine, self))

        def run(variables):
            state, _ = loop.begin(engine, variables, request)
            return loop.decode_loop(engine, variables, state, 1)

        jax.eval_shape(run, self.variables)
        raise StopIteration  # the command is not to go on

    monkeypatch.setattr(Model, "compile", trace)
    return engines


@pytest.mark.parametrize(
    ("platform", "drafter"),
    thinned(
        [("cpu", "hydra"), ("tpu", "hydra"), *(("gpu", drafter) for drafter in DRAFTERS)],
        ("cpu", "hydra"),
        ("gpu", "hydrapp"),
        ("gpu", "medusa"),
    ),
)
def test_the_default_command_finds_its_heads(platform, drafter, traced, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with pytest.raises(StopIteration):
        main(["--prompt", "def parse(", "--drafter", drafter])
    [(engine, model)] = traced
    assert (engine.tree.n_nodes == 64) == (platform != "cpu")
    assert 1 < engine.tree.path_length <= model.drafter.n_heads + 1
    assert model.dtype == ("float32" if platform == "cpu" else "bfloat16")
