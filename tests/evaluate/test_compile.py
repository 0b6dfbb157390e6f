"""`compile`: its targets, the program of this process's device, and figures that claim what they know."""

import json
import re
import tomllib
from importlib import metadata
from pathlib import Path

import jax
import pytest

from medusa_jax.commands import compile as command
from medusa_jax.cpu import library
from medusa_jax.devices.chips import CHIPS, Chip
from medusa_jax.errors import UserError
from medusa_jax.evaluate.compiled import report, targets
from medusa_jax.evaluate.compiled.programs import Case, Step
from medusa_jax.hlo.program import Program

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize(
    "figure, shown",
    [(1.16, "1.2"), (1.24, "1.2"), (34.7, "35"), (100.4, "100"), (768, "770"),
     (0.704, "0.70"), (0.066, "0.066"), (0, "0"), (12345, "12,000")],
)  # fmt: skip
def test_figures_have_the_digits_that_are_known(figure, shown):
    assert report.two_digits(figure) == shown


def step(cycles, kernels, read=0):
    stages = {"backbone": cycles} if cycles else {}
    program = Program({}, "")
    return Step(stages, 13 * 10**9, 15_340_000_000, kernels, read, {}, program, [], 4096)


@pytest.mark.parametrize("name", ["tpu-v5e", "h100", "here"])
def test_every_figure_is_called_estimated(name):
    chip = CHIPS.get(name) or Chip("cpu", 0, 0, 0, 0)
    platform = {"tpu-v5e": "tpu", "h100": "cuda", "here": "cpu"}[name]
    target = targets.Target(name, chip, (), "a compiler", platform)
    exact, tpu = name == "here", name == "tpu-v5e"
    case = Case(command.find_shape("llama-7b"), target, layers=32 if exact else 8)
    steps = step(34.7e6 * tpu, 598, 13.8e9 * (not tpu)), step(40.1e6 * tpu, 768, 17.7e9 * (not tpu))  # fmt: skip
    text = report.as_text(case, *steps)
    figures = [line for line in text.splitlines() if re.search(r"\d", line)]
    assert all(x.endswith(" (estimated)") or x.startswith(("|", "layers")) for x in figures)
    assert ("768; plain 598" if exact else "770; plain 600") in text
    assert ("| with drafts | 40 | 1.2 | 27 | 0.59 |" in text) == tpu
    assert ("17.7 GB, 1.4 of the weights; plain 13.8 GB" in text) == (not tpu)
    found = report.as_json(case, *steps)
    assert found["estimated"] and (found["step"]["ratio"] is not None) == tpu


def installed(monkeypatch, **versions):
    """Pretend that of all compilers these are installed."""

    def version(name):
        if name.replace("-", "_") in versions:
            return versions[name.replace("-", "_")]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_an_h100s_compiler_is_cuda_12s_or_13s(monkeypatch, cuda):
    installed(monkeypatch, **{f"jax_cuda{cuda}_pjrt": "9.9"})
    monkeypatch.setattr(targets, "_topology", lambda name, **_: (name,))
    target = targets.find_target("h100")
    assert target.compiler == f"jax-cuda{cuda}-pjrt 9.9" and target.devices == ("h100",)


def test_a_missing_compiler_is_named_with_the_version_that_this_jax_wants(monkeypatch):
    [libtpu] = [r for r in metadata.requires("jax") if r.startswith("libtpu")]
    installed(monkeypatch)
    with pytest.raises(UserError, match=f"'{libtpu.partition(';')[0]}'"):
        targets.find_target("v5e")
    with pytest.raises(UserError) as raised:
        targets.find_target("h100")
    for cuda in ("12", "13"):
        for part in ("plugin", "pjrt"):
            assert f"jax-cuda{cuda}-{part}=={jax.__version__}" in str(raised.value)


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


def test_a_compilers_failure_is_one_sentence():
    target = targets.Target("h100", CHIPS["h100"], (), "a compiler", "cuda")
    sentence = "a compiler cannot compile for h100: no ptxas"
    with pytest.raises(UserError, match=f"^{sentence}$"), command.compiling_for(target):
        raise jax.errors.JaxRuntimeError("no ptxas\nat line 3")


SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize("form", ["plain", "native"])
def test_compile_for_here_reports_the_program_of_this_device(
    form, tmp_path, capsys, monkeypatch
):
    if form == "native" and library() is None:
        pytest.skip("there is no compiler for the native kernels")
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", form)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    call = ["--for", "here", "--shape", str(tmp_path), "--tree", "4", "--context", "20"]
    assert command.main([*call, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["target"], found["device"]) == ("here", jax.devices()[0].device_kind)
    assert found["estimated"] and found["layers"] == {"compiled": 3, "all": 3, "within": 0}
    assert found["step"]["cycles"] is None and found["warnings"] == []
    assert 3 * 4 < found["plain"]["kernels"] < found["kernels"]
    # Every weight that a step needs is read: each layer's four kernels, the LM head, in float32.
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 64
    assert found["plain"]["read_bytes"] > 4 * (3 * layer + 32 * 64)
    assert found["read_bytes"] > found["plain"]["read_bytes"]
