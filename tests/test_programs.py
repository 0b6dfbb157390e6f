"""Functions that are jitted for each platform, and the store that they ask first."""

import jax
import numpy as np

from medusa_jax import programs
from medusa_jax.programs import program


def test_a_program_has_the_options_of_its_platform(monkeypatch):
    asked = []

    def jit(function, **arguments):
        asked.append(arguments)
        return real(function, static_argnums=arguments["static_argnums"])

    real = jax.jit
    monkeypatch.setattr(jax, "jit", jit)
    monkeypatch.setattr(programs, "OPTIONS", {"tpu": {"x": False}})

    @program(static_argnums=0)
    def add(n, x):
        """Adds."""
        return x + n

    assert add.__doc__ == "Adds."
    for name, options in (("cpu", None), ("tpu", {"x": False}), ("cpu", None)):
        monkeypatch.setattr(programs, "platform", lambda name=name: name)
        assert int(add(2, np.int32(3))) == 5
        assert asked[-1 if name == "tpu" else 0]["compiler_options"] == options
    assert len(asked) == 2  # one for each platform
    assert add._cache_size() == 1
    assert "stablehlo" in add.lower(2, np.int32(3)).as_text()


def test_a_store_is_asked_first_unless_a_program_runs_at_each_step(monkeypatch):
    class Store:
        def run(self, program, args):
            return None if args == (1,) else f"{program.__name__} of {args}"

        prepare = run

    def double(x):
        return 2 * x

    kept, at_each_step = program()(double), program(each_step=True)(double)
    assert programs.store is None and kept.prepare(3) is None and int(kept(3)) == 6
    monkeypatch.setattr(programs, "store", Store())
    assert kept(3) == kept.prepare(3) == "double of (3,)"
    assert [int(f(1)) for f in (kept, at_each_step)] == [2, 2]
    assert int(at_each_step(3)) == 6 and at_each_step.prepare(3) is None
