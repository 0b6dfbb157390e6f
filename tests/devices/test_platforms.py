"""The platform that programs are traced for, and that its options reach every program of decoding."""

import ast
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import medusa_jax
from medusa_jax.api import default_dtype
from medusa_jax.devices import platforms
from medusa_jax.sharding import make_mesh
from medusa_jax.training import placement
from medusa_jax.training.step import TrainState

DECODING = Path(medusa_jax.__file__).parent / "decoding"


def test_the_mesh_in_sight_says_the_platform():
    assert platforms.platform() == "cpu"
    kinds = {
        "tpu": ("TPU v5 lite", "tpu"),
        "cuda": ("NVIDIA H100 80GB HBM3", "gpu"),
        "rocm": ("AMD Instinct MI300X", "gpu"),
    }
    for name, (kind, platform) in kinds.items():
        device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
        mesh = AbstractMesh((1,), ("x",), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            assert platforms.platform() == name
    assert platforms.platform() == "cpu"


def test_the_default_device_says_the_platform_where_no_mesh_is(monkeypatch, capsys):
    """As JAX places arrays: `jax_default_device`, a device or a platform's name, before the first device."""

    class GpuDevice:
        platform = "gpu"
        client = SimpleNamespace(platform_version="cuda 13000")
        compute_capability = "7.5"

    [first, *_] = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="tpu")])
    assert platforms.platform() == "tpu"
    for default, name in (("cpu", "cpu"), (first, "cpu"), (GpuDevice(), "cuda")):
        with jax.default_device(default):
            assert platforms.platform() == name and default_dtype()
    assert platforms.platform() == "tpu"
    assert capsys.readouterr().err.count("note: ") == 1  # a T4 has no bfloat16


def test_programs_of_simulated_devices_are_planned_by_a_scheduler_that_waits(monkeypatch):
    """Unless the user says which."""
    scheduler = "--xla_cpu_enable_concurrency_optimized_scheduler="
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    for given, expected in (("", "false"), (f"{scheduler}true", "true")):
        monkeypatch.setenv("XLA_FLAGS", given)
        platforms.simulate_devices(8)
        assert os.environ["XLA_FLAGS"].endswith(f"{scheduler}{expected}")


def test_every_program_that_reads_weights_is_one_and_calls_no_other():
    """In decoding, only the keys of rows are jitted without the platform's options, which JAX refuses in a trace."""
    found = {"jit": {}, "program": {}}
    for file in DECODING.rglob("*.py"):
        for x in ast.walk(ast.parse(file.read_text())):
            for made in map(ast.unparse, getattr(x, "decorator_list", ())):
                kind = next((kind for kind in found if kind in made), None)
                found.get(kind, {})[f"{file.stem}.{getattr(x, 'name', '')}"] = ast.walk(x)
    assert [*found["jit"]] == ["sampling.row_keys"]
    programs = {name.partition(".")[2] for name in found["program"]} | {"idle"}
    for name, nodes in found["program"].items():
        called = {getattr(x.func, "id", "") for x in nodes if isinstance(x, ast.Call)}
        assert not called & programs, name


def test_a_training_step_is_compiled_with_the_options_of_its_platform(monkeypatch):
    mesh, zero = make_mesh(), jnp.zeros((), jnp.int32)
    step = lambda state, *_: (state, {})  # noqa: E731
    arguments = step, TrainState(zero, zero, {}, {}), {}, {}, mesh
    placement.compile_step(*arguments)
    monkeypatch.setitem(placement.TRAINING_OPTIONS, "cpu", {"xla_no_such_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        placement.compile_step(*arguments)
