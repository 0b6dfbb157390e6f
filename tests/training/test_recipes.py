"""Shipped recipes: sound, documented, and the real step of each compiles from shapes; configurations that are refused."""

import ast
import re
from operator import attrgetter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from cases import thinned
from family import parameters
from jax.sharding import AbstractMesh
from training_setup import ROOT, abstract_batch, stage_of, tiny_config, training_arch

from medusa_jax.commands import train as cli
from medusa_jax.config import Config, LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.model.llama import init_params
from medusa_jax.sharding import AXES, make_mesh, param_shardings
from medusa_jax.training import checks, dry
from medusa_jax.training.data import sources
from medusa_jax.training.dry import preview
from medusa_jax.training.optim.optimizer import make_optimizer
from medusa_jax.training.plan import RunPlan

FILES = sorted(path.stem for path in (ROOT / "configs").glob("[!o]*.py"))
# Of published models, for machines with accelerators; the others are ours, for any machine.
DEMO = LlamaConfig(4096, 256, 8, 4, 2, 64, 704, max_position=1024, tie_embeddings=True)
RECIPES = [name for name in FILES if not name.startswith(("demo", "smollm2"))]


def load(name, *more):
    config = f"--config={ROOT}/configs/{name}.py"
    return cli.parse([config, "--workdir=w", "--config.mesh=1,1,1", *more])


@pytest.mark.parametrize("name", FILES)
def test_recipes_are_sound_and_say_how_they_are_run(name):
    cfg = load(name)
    assert isinstance(cfg, Config)
    cfg.model.path = (
        cfg.model.path and "not/here"
    )  # a dry run of it has the shape of `model.arch`
    RunPlan(cfg, make_mesh(), dry=True)
    said = ast.get_docstring(ast.parse((ROOT / "configs" / f"{name}.py").read_text())) or ""
    assert f"python train.py --config=configs/{name}.py" in said
    if name in RECIPES:
        assert "What to expect" in said and "--config.dry_run" in said
    if cfg.train.stage == "medusa1":
        n = parameters(cfg.heads, DEMO if name.startswith("demo") else cfg.model.arch)
        if name.startswith("demo"):  # as bundled, in bfloat16
            assert 2 * n < 4_950_000
        elif name.startswith("smollm2"):
            [millions] = re.findall(r"([0-9.]+) M\s+parameters", said)
            assert n / 1e6 == pytest.approx(float(millions), abs=0.05)


def test_the_demo_s_heads_train_from_a_clone(tmp_path, monkeypatch):
    """From any directory, with what every installation has: model, tokenizer, text, text held out."""
    monkeypatch.chdir(tmp_path)
    cfg = cli.parse([f"--config={ROOT}/configs/demo_medusa.py", f"--workdir={tmp_path}/w"])
    assert "asyncio" in preview(cfg.data, cfg.model.path)
    named = (*sources.names(cfg.data.source), cfg.data.eval_source)
    files = [sources.files_in(name) for name in named]
    assert all(files) and len(set().union(*files)) == sum(map(len, files))
    assert (Path(cfg.model.path) / "model.safetensors").is_file()


@pytest.mark.parametrize("name", thinned(RECIPES, "vicuna7b_m2"))
def test_a_recipe_s_own_mesh_spreads_it_over_eight_devices(name):
    """Each device holds an eighth of what is stored and of the rows; nothing is compiled."""
    cfg = load(name)
    wanted = cli.parse([f"--config={ROOT}/configs/{name}.py", "--workdir=w"]).mesh
    assert wanted == (1, -1, 1)
    mesh = AbstractMesh((1, 8, 1), AXES)
    rows = cfg.train.batch_size // cfg.train.accumulation
    cfg.model.path = cfg.model.path and "not/here"
    cfg = RunPlan(cfg, mesh, dry=True)
    batch = cfg.train.batch_size
    assert batch // cfg.train.accumulation == min(8 * rows, batch)
    stage = stage_of(cfg, 100, mesh)
    key = jax.eval_shape(lambda: jax.random.key(0))
    frozen = dry.frozen_shapes(cfg)
    params = jax.eval_shape(stage.init, key, frozen)
    optimizer = make_optimizer(cfg.optim, cfg.groups, 100)
    stored = (frozen, params, jax.eval_shape(optimizer.init, params))
    shard = lambda x, s: jax.ShapeDtypeStruct(s.shard_shape(x.shape), x.dtype)  # noqa: E731
    shards = jax.tree.map(shard, stored, param_shardings(mesh, stored))
    # Whole on each: norms, scales of 4-bit kernels, one of the two factors of adapters.
    assert dry.stored_bytes(shards) <= 1.5 * dry.stored_bytes(stored) / 8
    for x in abstract_batch(cfg, mesh).values():
        micro, rows, *rest = x.shape
        assert x.sharding.shard_shape(x.shape) == (micro, rows // 8, *rest)


# The other drafters' recipes have their counts in tests/heads.
MEDUSA = [name for name in RECIPES if load(name).heads.drafter == "medusa"]

# What the papers and model cards say, in billions.
BACKBONES = {
    "vicuna7b_m1": 6.74, "vicuna7b_m2": 6.74, "vicuna13b_m1": 13.02, "vicuna13b_m2": 13.02,
    "vicuna33b": 32.53, "zephyr7b": 7.24, "llama31_8b": 8.03,
}  # fmt: skip


@pytest.mark.parametrize("name", thinned(MEDUSA, "llama31_8b"))
def test_recipes_have_the_sizes_of_their_models(name):
    """Shapes of everything that is trained, without a compilation."""
    cfg = load(name)
    arch = cfg.model.arch
    key = jax.eval_shape(lambda: jax.random.key(0))
    backbone = jax.eval_shape(lambda k: init_params(arch, k, jnp.bfloat16), key)
    assert dry.count(backbone) / 1e9 == pytest.approx(BACKBONES[name], abs=0.01)
    params = jax.eval_shape(stage_of(cfg, 100).init, key, {"backbone": backbone})
    D, V, K = arch.d_model, arch.vocab_size, cfg.heads.n_heads
    own = V * D if cfg.heads.lm_head == "own" else 0
    assert dry.count(params["heads"]) == K * (cfg.heads.n_layers * (D * D + D) + own)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_passes_the_dry_run(name, capsys):
    plan = RunPlan(load(name, "--config.dry_run"), dry=True)
    report = dry.dry_run(plan)
    assert report["total_bytes"] > 0
    assert "memory per device" in capsys.readouterr().out


CACHED = {"data.cache_features": "float32", "data.packing": "first_fit"}
LONGROPE = training_arch(rope_scaling="longrope", rope_short=(1.0, 1.0, 1.0, -1.0))
YARN = {"model.arch.rope_scaling": "yarn", "model.arch.rope_theta": 1.0}
ADAPTERS = {"optim.name": "adamw", "lora.rank": 4}


@pytest.mark.parametrize(
    ("stage", "fields", "words"),
    [
        ("backbone", {"train.batch_size": 6}, "multiple of accumulation"),
        ("backbone", {"optim.lr": float("nan")}, "optim.lr is from 0 to .*, not nan"),
        ("backbone", {"train.lambda_decay": -5.0}, "train.lambda_decay is from 0"),
        ("backbone", {"optim.b1": 2.0}, "optim.b1 is from 0 to .*, not 2.0"),
        ("backbone", {"optim.eps": 0.0}, "optim.eps is from 1e-30 to .*, not 0.0"),
        ("backbone", {"train.steps": "5"}, "train.steps should be int, not '5'"),
        ("medusa1", {"train.feature_weight": 1.0}, "heads.lm_head shared, not 'own'"),
        ("backbone", {"data.seq_len": 1000}, "from 3 to 64, not 1000"),
        ("backbone", {"data.format": "chat"}, "did you mean 'messages'"),
        ("medusa1", ADAPTERS, "no adapters"),
        ("medusa2", {"model.quantise": "nf4"}, "trains the backbone itself"),
        ("medusa1", {"train.backbone_loss": "kl"}, "trains no backbone"),
        ("medusa1", {"model.add_layers": 1}, "model.add_layers needs a stage that trains"),
        ("native", {"train.label_weight": 0.0}, "the heads' loss is 0: .*label_weight"),
        ("medusa1", {"train.lambda_decay": 0.0}, "the heads' loss is 0: .*lambda_decay"),
        ("native", {"train.lambda_0": 0.0}, "the heads' loss is 0: .*lambda_0"),
        ("backbone", ADAPTERS | {"lora.alpha": 0.0}, r"lora\.alpha is 0"),
        ("native", {"heads.drafter": "draft_model"}, "draft_model has no heads to train"),
        ("native", {"model.arch.rope_dim": 7}, "model.arch: rope_dim 7 is not an even"),
        ("native", {"model.arch.rope_dim": 98}, "98 is not an even number up to head_dim"),
        ("native", {"model.arch.rope_scaling": "longrope"}, "longrope needs .* numbers"),
        ("native", {"model.arch": LONGROPE}, "longrope needs 4 .* above 0 in rope_short"),
        ("native", YARN, "rope_theta should be above 1 for yarn"),
        ("native", {"model.arch.window_layers": (True,) * 9}, "is for 9 layers, not for"),
        ("native", {"model.add_layers": 1}, r"add_layers needs a model\.path"),
        ("native", {"train.backbone_loss": "kl"}, r"model\.path"),
        ("medusa2", CACHED, "a backbone and rows that do not change"),
    ],
)
def test_what_is_refused(stage, fields, words):
    cfg = tiny_config("", stage, accumulation=4)
    for path, value in fields.items():
        group, name = path.rsplit(".", 1)
        setattr(attrgetter(group)(cfg), name, value)
    with pytest.raises(UserError, match=words) as error:
        checks.check(cfg)
        RunPlan(cfg, make_mesh(), dry=True)
    assert "\n" not in str(error.value)
