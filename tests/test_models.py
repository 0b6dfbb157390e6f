"""The heads that come with a model called by name: sizes, provenance, trees; no model is needed."""

import json
import os

import numpy as np
import pytest

from medusa_jax.api import device_tree
from medusa_jax.api.finding import MODELS, bundled_heads
from medusa_jax.config import LlamaConfig
from medusa_jax.interop.heads_io import open_heads
from medusa_jax.interop.names import NAMES
from medusa_jax.tree import Tree
from medusa_jax.tree.files import load_tree_file

BUNDLED = [(name, drafter) for name in NAMES for drafter in bundled_heads(name)]


def recipe_of(name, drafter):
    heads = MODELS / NAMES[name].heads / drafter / "heads.json"
    return json.loads(heads.read_text())["recipe"]


def test_every_family_is_there_and_within_its_size():
    families = {"medusa", "hydra", "hydrapp", "amphista", "eagle"}
    for name, row in NAMES.items():
        assert set(bundled_heads(name)) == families and row.drafter in families
    for name, drafter in BUNDLED:
        folder = MODELS / NAMES[name].heads / drafter
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 9_000_000, drafter


@pytest.mark.parametrize(("name", "drafter"), BUNDLED)
def test_weights_are_whole_and_of_their_description(name, drafter):
    stored = open_heads(str(MODELS / NAMES[name].heads / drafter))
    assert stored.heads.drafter == drafter
    config = LlamaConfig(**recipe_of(name, drafter)["config"]["model"]["arch"])
    arrays = stored.read(config)
    assert arrays and all(
        np.isfinite(np.asarray(x, np.float32)).all() for x in arrays.values()
    )
    ids = stored.ids
    assert ids is not None and len(np.unique(ids)) == len(ids) == stored.heads.draft_vocab
    assert ids.min() >= 0 and ids.max() < config.vocab_size


@pytest.mark.parametrize(("name", "drafter"), BUNDLED)
def test_the_tree_is_the_fastest_of_its_evidence_and_fits_the_heads(name, drafter):
    written = load_tree_file(MODELS / NAMES[name].heads / drafter / "tree.json")
    assert written["nodes"] == device_tree.fastest(written["batches"][0]["rows"])
    assert written["nodes"] == len(written["choices"]) + 1
    largest = Tree.from_choices(written["growth"])
    heads = recipe_of(name, drafter)["config"]["heads"]
    assert largest.n_nodes >= 64 and largest.drafted.depth <= heads["n_heads"]
    assert largest.max_rank < heads["draft_vocab"]


@pytest.mark.parametrize(("name", "drafter"), BUNDLED)
def test_provenance_names_no_machine(name, drafter):
    data = recipe_of(name, drafter)["config"]["data"]
    for path in (*data["source"].split(","), data["eval_source"], data["features_path"]):
        assert path and not os.path.isabs(path)
    told = (MODELS / NAMES[name].heads / "README.md").read_text()
    assert f"| `{drafter}/` |" in told
