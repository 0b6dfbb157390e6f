"""`compile`: its targets, the program of this process's device, and figures that claim what they know."""

import json
import tomllib
from importlib import metadata
from pathlib import Path

import jax
import pytest
from cases import wide

from medusa_jax.arch import LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.files.hf_writer import config_to_hf
from medusa_jax.native import library
from research.compiled import command, targets

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("extra", ["cuda", "cuda12", "cuda13", "tpu", "aot"])
def test_extras_for_accelerators_take_the_versions_that_jax_pins(extra):
    """By extras of jax itself, under the bounds of the dependency."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    [bounds] = [r for r in project["dependencies"] if r.startswith("jax>=")]
    [given] = [r for r in project["optional-dependencies"][extra] if r.startswith("jax[")]
    names, _, rest = given.removeprefix("jax[").partition("]")
    assert "jax" + rest == bounds
    assert {*names.split(",")} <= {*metadata.metadata("jax").get_all("Provides-Extra")}


@pytest.mark.parametrize("name", ["here:2x2", "h100:1", "v7", "her"])
def test_an_unknown_target_is_one_sentence(name):
    with pytest.raises(UserError, match="--for is here, h100, or one of v4, v5e"):
        targets.find_target(name)


SMALL = config_to_hf(LlamaConfig(64, 32, 3, 2, 1, 16, 64, 256))


@pytest.mark.parametrize("form", [*wide("plain"), "native"])
def test_the_program_of_this_device(form, tmp_path, capsys, monkeypatch):
    if form == "native" and library() is None:
        pytest.skip("there is no compiler for the native kernels")
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", form)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    call = ["--for", "here", "--shape", str(tmp_path), "--tree", "4", "--context", "20"]
    # Every weight that a step needs: each layer's four kernels, the LM head, in float32.
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 64
    needed = 4 * (3 * layer + 32 * 64)
    assert command.main([*call, "--drafter", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["target"], found["device"]) == ("here", jax.devices()[0].device_kind)
    assert found["estimated"] and found["sent_bytes"] == {}
    assert found["layers"] == {"compiled": 3, "all": 3}
    assert needed < found["weight_bytes"] < 1.1 * needed < found["memory_bytes"]
    assert command.main([*call, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"]["cycles"] is None and found["warnings"] == []
    assert 3 * 4 < found["plain"]["kernels"] < found["kernels"]
    assert needed < found["plain"]["read_bytes"] < found["read_bytes"]
