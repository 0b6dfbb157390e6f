"""What a run does, resolved from its configuration: shapes, devices, microbatches, bounds of fields."""

import dataclasses
import typing

import numpy as np
import pytest
from jax.sharding import AbstractMesh
from training_setup import tiny_config, training_arch

from medusa_jax.arch import LlamaConfig
from medusa_jax.config import Config, TrainConfig, override
from medusa_jax.errors import UserError
from medusa_jax.files import known
from medusa_jax.files.fingerprint import fingerprint
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.hf_config import SCALINGS
from medusa_jax.heads.dflash import DSparkConfig
from medusa_jax.sharding import AXES
from medusa_jax.training import plan as plans
from medusa_jax.training.models import first_backbone
from medusa_jax.training.partition import TABLE
from medusa_jax.training.plan import RunPlan


def test_a_plan_has_the_shape_of_the_model_and_its_added_layers(model):
    cfg = tiny_config("", "medusa2")
    cfg.model.path, cfg.model.add_layers = model, 2
    plan = RunPlan(cfg, dry=True)
    assert plan.arch == training_arch(n_layers=3) == plan.model.arch
    assert plan.record["model"]["arch"]["n_layers"] == 3
    assert plan.groups == ("backbone", "heads")
    assert plan.drafter is not None and plan.drafter.llama == plan.arch
    assert cfg.model.arch.n_layers == 1  # the configuration is unchanged
    params, mark = first_backbone(plan, BaseFiles.open(model), np.float32)
    assert mark == fingerprint(plan.arch, params)


@pytest.mark.parametrize("path", ["some/model", "smollm2"])
def test_a_dry_plan_downloads_nothing(path, monkeypatch):
    """A model on the hub or of a missing package has the recipe's shape; a run reads its files."""
    missing = [dataclasses.replace(row, package="no_such_package") for row in known.KNOWN]
    monkeypatch.setattr(known, "KNOWN", missing)
    cfg = tiny_config("")
    cfg.model.path = path

    def download(path, files=None):
        raise UserError(f"{path} would be downloaded")

    monkeypatch.setattr(plans, "resolve", download)
    plan = RunPlan(cfg, dry=True)
    assert plan.arch == cfg.model.arch and plan.drafter is None
    cfg.data.source = __file__
    with pytest.raises(UserError, match=f"{path} would be downloaded"):
        RunPlan(cfg)


@pytest.mark.parametrize(("devices", "accumulation"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_a_mesh_needs_fewer_microbatches(devices, accumulation):
    cfg = tiny_config("", accumulation=4)
    mesh = AbstractMesh((1, devices, 1), AXES)
    plan = RunPlan(cfg, mesh, dry=True)
    assert plan.train.accumulation == accumulation
    assert plan.microbatch == 8 // accumulation


def test_steps_follow_the_rows_of_an_epoch():
    cfg = tiny_config("", steps=0, epochs=3)
    plan = RunPlan(cfg, dry=True)
    assert [plan.steps(rows) for rows in (1, 8, 20)] == [1, 3, 7]
    cfg.train.steps = 5
    assert RunPlan(cfg, dry=True).steps(20) == 5


def test_data_that_does_not_exist_is_refused_before_a_model_is_read(tmp_path):
    cfg = tiny_config(str(tmp_path / "none.jsonl"))
    cfg.model.path = str(tmp_path / "nor this")
    with pytest.raises(UserError, match="no file or token directory"):
        RunPlan(cfg)


def choices(kind, name):
    """The names that a field may have."""
    [bound] = typing.get_type_hints(kind, include_extras=True)[name].__metadata__
    return bound.names


def test_choices_are_those_of_the_code_that_reads_them():
    stages = dict.fromkeys(row.partition("/")[0] for row in TABLE)
    assert choices(TrainConfig, "stage") == tuple(stages)
    assert choices(LlamaConfig, "rope_scaling") == ("none", *SCALINGS)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("heads.mask_token", -2, "heads.mask_token is from -1 to .*, not -2"),
        ("heads.n_layers", "2", "heads.n_layers should be int, not '2'"),
        ("optim.name", "muons", "did you mean 'muon'"),
        ("lora.dropout", 1.0, "lora.dropout is from 0 to 0.999999, not 1.0"),
        ("mesh", (1, 1), "mesh should be tuple"),
        ("model.arch.rope_factor", 0.0, "rope_factor is from 1e-30 to .*, not 0.0"),
        ("model.arch.logit_divisor", 0.0, "logit_divisor is from 1e-30 to .*, not 0.0"),
        ("model.arch.rope_original_max_position", 0, "position is from 1 to .*, not 0"),
    ],
)
def test_a_field_is_set_within_its_bounds(field, value, words):
    """Those of a drafter, too."""
    cfg = Config(heads=DSparkConfig())
    with pytest.raises(UserError, match=words):
        override(cfg, field, value)
    assert cfg == Config(heads=DSparkConfig())
