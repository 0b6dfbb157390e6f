"""The table of layouts, and layouts of other packages."""

import shlex
import subprocess
import sys

import numpy as np
import pytest
from head_files import medusa_state, write
from our_heads import exported, write_heads
from refusals import refused
from safetensors.numpy import load_file

from medusa_jax.config import HeadsConfig
from medusa_jax.files.layouts import registry
from medusa_jax.files.layouts.engines import ENGINES
from medusa_jax.files.layouts.heads_io import open_heads

# A package with Medusa's heads under keys of its own, in a file of its own.
PACKAGE = """
import dataclasses
from medusa_jax.files.layouts.layout import Layout
from medusa_jax.files.layouts.medusa_files import MedusaFiles
from medusa_jax.files.tensor import rename

class Mine(Layout):
    name = "mine"
    drafters = ("medusa",)
    loading = "`load_mine`"

    def why_not(self, heads, llama):
        return "" if heads.n_heads < 4 else "mine has room for three heads"

    def fits(self, tensors):
        return all(key.startswith("mine/") for key in tensors)

    def open(self, files):
        tensors = rename(files.tensors, lambda key: key.removeprefix("mine/"))
        stored = MedusaFiles().open(dataclasses.replace(files, tensors=tensors))
        return dataclasses.replace(stored, layout="mine")

    def write(self, export, out):
        form = {path: ("mine/" + path, False) for path in export.params}
        export.write(out, "model.safetensors", export.arrays(form.get), {})

nothing = 1
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The package, not installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "mine.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("mine", None)


@pytest.fixture
def installed(mine):
    """The package with its entry point, as pip leaves it."""
    info = mine / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[medusa_jax.layouts]\nmine = mine:Mine\n")


def test_every_layout_of_the_table():
    """Each class has the name of a target and the table's drafters; each drafter's engines load what holds its heads."""
    for target, row in registry.TARGETS.items():
        assert row.purpose
        for drafter in row.layouts:
            layout = registry.layout_of(target, drafter)
            assert layout.name in registry.TARGETS and drafter in layout.drafters
            assert {*layout.drafters} <= row.layouts.keys()
    assert registry.layout_of("native", "another:Drafter").name == "native"
    names = [layout.name for layout in registry.readers()]
    written = {"native", "sglang", "speculators", "tpu_inference", "sglang_jax"}
    assert written | {*names} == registry.TARGETS.keys()
    for engine in ENGINES.values():
        for drafter, targets in engine.items():
            assert {*targets} <= {*registry.targets_of(drafter)}


def test_heads_of_a_class_of_ones_own_are_loaded_by_its_name():
    heads = HeadsConfig("mine:Kind")
    layout = registry.layout_of("native", "mine:Kind")
    words = shlex.split(layout.how_to_load(heads, "a model", "my heads").strip("`"))
    assert words[2:] == ["--model", "a model", "--drafter", "mine:Kind:my heads"]


def test_a_class_by_its_name(mine, base, tmp_path):
    """--to module:Class writes; nothing recognises the file."""
    stored = write_heads(tmp_path / "heads", base, HeadsConfig(n_heads=3))
    out = exported(stored, base, "mine:Mine", tmp_path / "out")
    assert "Loading: `load_mine`." in (out / "README.md").read_text()
    keys = load_file(out / "model.safetensors").keys()
    assert keys and all(key.startswith("mine/heads_") for key in keys)
    with refused("keys of no known draft heads, such as 'mine/"):
        open_heads(str(out))
    more = write_heads(tmp_path / "more", base, HeadsConfig(n_heads=4))
    with refused("mine has room for three heads"):
        exported(more, base, "mine:Mine", tmp_path / "no")


def test_an_installed_package(installed, base, tmp_path):
    """Its name is a value of --to, and its files are recognised."""
    stored = write_heads(tmp_path / "heads", base, HeadsConfig(n_heads=3))
    assert exported(stored, base, "mine", tmp_path / "out").is_dir()
    state = {f"mine/{key}": x for key, x in medusa_state(2).items()}
    again = open_heads(str(write(tmp_path / "in", state, "model.safetensors", {})))
    assert (again.layout, again.heads.n_heads) == ("mine", 2)
    kernel = again.read(base.config)["heads_1/layers_0/kernel"]
    np.testing.assert_array_equal(kernel.T, state["mine/1.0.linear.weight"])


@pytest.mark.parametrize(
    ("target", "match"),
    [
        (
            "vlm",
            "--to is one of native, .*, or module:Class, not 'vlm'; did you mean 'vllm'",
        ),
        (
            "nowhere:Mine",
            "layout nowhere:Mine cannot be imported: No module named 'nowhere'",
        ),
        ("mine:Other", "layout mine:Other cannot be imported: .*'Other'"),
        ("mine:nothing", "layout mine:nothing is no subclass of .*Layout"),
    ],
)
def test_no_such_layout(mine, target, match, base, tmp_path):
    stored = write_heads(tmp_path / "heads", base, HeadsConfig(n_heads=3))
    with refused(match):
        exported(stored, base, target, tmp_path / "out")


def test_the_table_needs_no_jax():
    """`convert --help` and training's `ENGINES` show it at once."""
    code = "import sys, medusa_jax.commands.convert; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
