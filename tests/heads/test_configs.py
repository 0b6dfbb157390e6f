"""The shipped configurations of draft heads: sound, and within the demo's size limit."""

import dataclasses
import re
from pathlib import Path

import family
import jax
import pytest

from medusa_jax.commands.train import load_config
from medusa_jax.config import LlamaConfig
from medusa_jax.heads import Backbone, make_drafter, vocabulary
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.training import checks

FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))
DEMO = LlamaConfig(4096, 256, 5, 4, 2, 64, 704, max_position=1024, tie_embeddings=True)


def parameters(cfg, llama):
    """Number of parameters of the heads, from shapes alone; of the backbone's layers one will do."""
    llama = dataclasses.replace(llama, n_layers=1)
    drafter = make_drafter(cfg.heads, llama)

    def init(key):
        backbone = Backbone(Llama(llama), init_params(llama, key))
        return drafter.init(key, vocabulary.stand_in(backbone, cfg.heads))

    return family.count(jax.eval_shape(init, jax.random.key(0)))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_sound(file):
    cfg = load_config(str(file))
    checks.check_choices(cfg)
    if cfg.train.stage != "medusa1":
        return
    assert f"--config=configs/{file.name}" in file.read_text()
    if file.stem.startswith("demo_"):  # as bundled, in bfloat16
        assert 2 * parameters(cfg, DEMO) < 4_950_000
    elif file.stem.startswith("smollm2_"):  # what its docstring says
        said = re.search(r"([0-9.]+) M\s+parameters", file.read_text())
        assert parameters(cfg, cfg.model.arch) / 1e6 == pytest.approx(
            float(said[1]), abs=0.05
        )
    else:
        assert parameters(cfg, cfg.model.arch) > 1e8
