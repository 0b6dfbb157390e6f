"""Whole runs on a tiny backbone: frozen stays frozen, poison is skipped, kills do no harm; which tokens heads score."""

import json
import os
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from closeness import assert_close
from training_setup import (
    VOCAB,
    abstract_batch,
    changes,
    groups_of,
    records,
    run,
    stage_of,
    tiny_config,
)

import medusa_jax
from medusa_jax.config import HeadsConfig
from medusa_jax.errors import UserError
from medusa_jax.files.layouts import heads_io
from medusa_jax.files.layouts.heads_io import open_heads
from medusa_jax.heads import vocabulary
from medusa_jax.heads.eagle import EagleConfig
from medusa_jax.heads.eagle3 import Eagle3Config
from medusa_jax.model.llama import init_params
from medusa_jax.sharding import make_mesh
from medusa_jax.training import trainer
from medusa_jax.training.data.rows import TokenRows
from medusa_jax.training.draft_tokens import DRAFT_VOCAB, draft_vocab
from medusa_jax.training.optim.optimizer import make_optimizer, make_schedule
from medusa_jax.training.placement import compile_step, microbatches
from medusa_jax.training.plan import RunPlan
from medusa_jax.training.step import init_state, make_step


def test_an_export_that_fails_leaves_no_directory(tmp_path, monkeypatch):
    def full(directory, *_):
        os.makedirs(directory)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "export", full)
    own = types.SimpleNamespace(heads_recipe=None, params={})
    cfg = tiny_config("", "medusa1")
    cfg.workdir = str(tmp_path)
    plan = RunPlan(cfg, dry=True)
    run = types.SimpleNamespace(plan=plan, setup=own, state=own, steps=1, figures={})
    with pytest.raises(UserError, match=r"export could not.*No space left"):
        trainer.Run.export(run, "export", 1)
    assert not os.listdir(tmp_path)


@pytest.fixture(scope="module")
def backbone(tokens, tmp_path_factory):
    """The directory of a backbone trained for 40 steps."""
    workdir = tmp_path_factory.mktemp("backbone")
    cfg = tiny_config(tokens, steps=40, eval_every=20, save_every=20)
    cfg.data.eval_source, cfg.data.eval_samples = tokens, 12
    run(cfg, workdir)
    return str(workdir / "export")


# EAGLE-1 by its loss; EAGLE-3, which reads inside the model, from hidden states in 8 bits: to the
# entropy of its teacher there is less to learn.
REGRESSION = {"feature_weight": 1.0, "teacher_weight": 0.1, "hidden_noise": 1.6}
TEACHER, FEW = {"teacher_weight": 1.0}, Eagle3Config(n_heads=3, draft_vocab=56)
CONTINUED = [
    (EagleConfig(n_heads=3), "float32", 5e-3, 0.9, REGRESSION),
    (FEW, "float8", 2e-2, 0.96, TEACHER),
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("heads", "kind", "lr", "share", "fields"), wide(*CONTINUED))
def test_eagle_learns_and_its_export_decodes(
    heads, kind, lr, share, fields, backbone, tokens, tmp_path
):
    """From hidden states that were kept, over the first two of its levels."""
    fields |= {"steps": 60, "save_every": 60, "levels": 2, "label_weight": 0.0}
    cfg = tiny_config(tokens, "medusa1", **fields)
    cfg.model.path, cfg.optim.name, cfg.heads = backbone, "adamw", heads
    cfg.data.packing, cfg.data.cache_features, cfg.optim.lr = "first_fit", kind, lr
    cfg.data.eval_source, cfg.data.eval_samples = tokens, 12
    run(cfg, tmp_path)
    log = records(tmp_path)
    first, last = (np.mean([r["objective"] for r in x]) for x in (log[:5], log[-5:]))
    assert last < share * first and len(log[0]["loss"]) == 2
    assert records(tmp_path, "eval")[-1]["accepted_length_chain"] > 1
    names = {p.name for p in (tmp_path / "checkpoints" / "60").rglob("*")}
    assert "trainable" in names and not any("embed" in name for name in names)
    heads = str(tmp_path / "export")
    drafting = medusa_jax.load(backbone, heads, dtype="float64", tree="chain:3")
    recipe = json.loads((tmp_path / "export" / "heads.json").read_text())["recipe"]
    assert recipe["config"]["train"]["stage"] == "medusa1"
    options = medusa_jax.Options(max_new_tokens=30)
    [found] = drafting.generate([[5, 6, 7, 8]], options)
    [plain] = drafting.generate([[5, 6, 7, 8]], options, tree="none")
    assert found.token_ids == plain.token_ids and found.steps < plain.steps


def pieces(cfg, tokens):
    """Everything that one step needs."""
    mesh = make_mesh(cfg.mesh)
    stage = stage_of(cfg, 10)
    schedule = make_schedule(cfg.optim, 10)
    groups = groups_of(cfg)
    optimizer = make_optimizer(cfg.optim, groups, 10)
    frozen = {}
    if "backbone" not in groups:
        frozen = {"backbone": init_params(cfg.model.arch, jax.random.key(5))}
    state = init_state(stage, optimizer, mesh, frozen, 0)
    step = make_step(stage, optimizer, schedule, 0)
    compiled = compile_step(step, state, frozen, abstract_batch(cfg, mesh), mesh)
    rows = TokenRows(tokens, cfg.data, cfg.model.arch.vocab_size)
    return mesh, compiled, state, frozen, rows


def host(tree):
    return jax.tree.map(lambda x: np.array(x), tree)


@pytest.mark.parametrize("stage", ["medusa1", *wide("backbone", "medusa2")])
def test_microbatches_add_up(tokens, stage):
    """Four microbatches give the update of the whole batch, although their counts differ."""
    results = []
    for accumulation in (1, 4):
        cfg = tiny_config(tokens, stage, accumulation=accumulation)
        cfg.optim.name = "adamw"
        cfg.optim.eps = 1e-3  # no division by tiny gradients
        mesh, step, state, frozen, rows = pieces(cfg, tokens)
        before = host(frozen)
        batch = rows.batch(range(8))
        batch["counted"] &= np.arange(16)[None, :] > 2 * np.arange(8)[:, None]
        state, metrics = step(state, frozen, microbatches(mesh, batch, accumulation))
        results.append((host(state.params), host(metrics)))
        if before:  # has neither gradient nor moments and keeps its bits
            jax.tree.map(np.testing.assert_array_equal, host(frozen), before)
            shapes = {x.shape for x in jax.tree.leaves((state.params, state.opt))}
            mlp = before["backbone"]["layers_0"]["mlp"]
            assert mlp["up_proj"]["kernel"].shape not in shapes
    (one, one_metrics), (four, four_metrics) = results
    if stage == "medusa2":
        assert_close(four, one)
        assert_close(four_metrics, one_metrics)
    else:
        assert_close(four, one, 256)  # the optimizer divides by small gradients
        for name in ("loss", "top5"):
            assert_close(four_metrics[name], one_metrics[name])


def test_a_poisoned_batch_changes_nothing(tokens):
    cfg = tiny_config(tokens, "medusa1")
    mesh, step, state, frozen, rows = pieces(cfg, tokens)
    backbone = frozen["backbone"]
    poison = backbone["embed_tokens"]["embedding"].at[7].set(jnp.nan)
    frozen = {"backbone": backbone | {"embed_tokens": {"embedding": poison}}}
    before = host((state.params, state.opt))
    batch = rows.batch(range(8))
    clean = batch | {"tokens": np.where(batch["tokens"] == 7, 8, batch["tokens"])}
    state, metrics = step(state, frozen, microbatches(mesh, batch, 1))
    assert bool(metrics["skipped"]) and int(state.step) == 1 and int(state.updates) == 0
    jax.tree.map(np.testing.assert_array_equal, host((state.params, state.opt)), before)
    state, metrics = step(state, frozen, microbatches(mesh, clean, 1))
    assert not bool(metrics["skipped"]) and int(state.updates) == 1
    assert np.isfinite(np.asarray(metrics["loss"])).all()
    empty = clean | {"counted": np.zeros_like(clean["counted"])}
    state, metrics = step(state, frozen, microbatches(mesh, empty, 1))
    assert not bool(metrics["skipped"]) and not np.asarray(metrics["loss"]).any()


@pytest.mark.wide
def test_too_many_bad_steps_end_the_run(tokens, tmp_path, capsys):
    run(tiny_config(tokens, steps=4), tmp_path)
    cfg = tiny_config(tokens, steps=30, max_bad_steps=3)
    cfg.optim.lr = 1e30  # the first update ruins the weights
    with pytest.raises(UserError, match="3 steps in a row"):
        run(cfg, tmp_path)
    assert "skipped (" in capsys.readouterr().err


@pytest.mark.usefixtures("compiled_once")
def test_a_run_that_diverged_says_so(tokens, tmp_path, monkeypatch, capsys):
    """By its held-out text, else by its last step."""
    for steps, evaluator in ((1, lambda *_: {"loss": [np.nan]}), (2, None)):
        monkeypatch.setattr(trainer, "evaluator_of", lambda *_, found=evaluator: found)
        cfg = tiny_config(tokens, "medusa1", steps=steps)
        cfg.optim.lr = 1e30
        run(cfg, tmp_path)
        assert capsys.readouterr().err.splitlines()[-1].startswith("diverged (")


@pytest.mark.usefixtures("compiled_once")
def test_bad_steps_are_counted_through_a_resumed_run(tokens, tmp_path):
    """Those in all, and those in a row."""
    for name, n in (("whole", 3), ("broken", 2), ("broken", 3)):
        cfg = tiny_config(tokens, "medusa1", steps=n, hidden_noise=1e30, max_bad_steps=4)
        cfg.optim.schedule = "constant"
        run(cfg, tmp_path / name)
    assert records(tmp_path / "broken") == records(tmp_path / "whole")
    assert [r["bad_steps"] for r in records(tmp_path / "whole")] == [1, 2, 3]
    cfg.train.steps = 5
    with pytest.raises(UserError, match="4 steps in a row"):
        run(cfg, tmp_path / "broken")


def test_a_run_goes_on_with_what_it_may_change(tokens, tmp_path, capsys):
    """And says so, field by field; its end is not the result of a shorter run."""
    run(tiny_config(tokens, steps=4), tmp_path / "run")
    with pytest.raises(UserError, match="at step 4, beyond the 2 of this run"):
        run(tiny_config(tokens, steps=2), tmp_path / "run")
    shutil.copytree(tokens, tmp_path / "moved")
    other = tiny_config(str(tmp_path / "moved"), steps=4, eval_every=2)
    other.data.seed = 1
    with pytest.raises(UserError, match=r"another configuration \(data.seed: 0 -> 1\):"):
        run(other, tmp_path / "run")
    other.data.seed = 0
    capsys.readouterr()
    run(other, tmp_path / "run")
    said = [line for line in capsys.readouterr().err.splitlines() if "changed" in line]
    assert [line.split(": ")[1] for line in said] == ["data.source", "train.eval_every"]
    assert said[1].endswith("train.eval_every: 8 -> 2")
    assert changes(other) == {}  # what the next start is compared with
    np.save(tmp_path / "moved" / "tokens.npy", np.load(f"{tokens}/tokens.npy")[::-1].copy())
    with pytest.raises(UserError, match="made with another text"):
        run(other, tmp_path / "run")


def few(tokens, model, stage="medusa1", **train):
    cfg = tiny_config(tokens, stage, **train)
    cfg.model.path, cfg.optim.name = model, "adamw"
    cfg.heads = HeadsConfig(n_heads=3, lm_head="shared", draft_vocab=40)
    return cfg


@pytest.mark.wide
def test_a_run_keeps_its_tokens(tokens, model, tmp_path, capsys):
    """Counted in the text; then resumed, and gone on with in stage 2, under other counts."""
    cfg = few(tokens, model, steps=4, save_every=4)
    cfg.data.eval_source, cfg.data.eval_samples = tokens, 8
    run(cfg, tmp_path / "m1")
    text = np.load(f"{tokens}/tokens.npy")
    counts = np.bincount(text, minlength=VOCAB)
    chosen = vocabulary.most_frequent(counts, 40)
    share = counts[chosen].sum() / counts.sum()
    said = capsys.readouterr().err
    assert f"heads guess among 40 of 64 tokens: {100 * share:.2f}% of the text" in said
    assert "  inside 0." in said
    log = records(tmp_path / "m1")[-1]
    assert np.abs(np.array(log["inside"]) - share).max() < 0.1
    assert all(np.array(log["top5"]) <= log["inside"])

    other = tmp_path / "counts.npy"
    np.save(other, np.arange(VOCAB))  # the last forty
    cfg = few(tokens, model, steps=6, save_every=6)
    cfg.data.draft_vocab_from = str(other)
    run(cfg, tmp_path / "m1")
    said = capsys.readouterr().err
    assert "resuming from step 4" in said
    assert "counts.npy', without effect on a resumed run" in said
    export = str(tmp_path / "m1" / "export")
    np.testing.assert_array_equal(open_heads(export).ids, chosen)
    loaded = heads_io.load_heads(export, cfg.model.arch, make_mesh())[1]
    assert set(loaded) == {"heads_0", "heads_1", "heads_2", vocabulary.GROUP}

    cfg = few(tokens, model, "medusa2", steps=2)
    cfg.train.heads_path, cfg.data.draft_vocab_from = export, str(other)
    run(cfg, tmp_path / "m2")
    heads = str(tmp_path / "m2" / "export" / "heads")
    np.testing.assert_array_equal(open_heads(heads).ids, chosen)
    log = records(tmp_path / "m2")[-1]
    assert len(log["inside"]) == 3 and "lm_inside" not in log

    cfg.train.steps, cfg.train.heads_path = 3, "/nowhere"  # is not read again
    run(cfg, tmp_path / "m2")
    np.testing.assert_array_equal(open_heads(heads).ids, chosen)
    recipe = json.loads((tmp_path / "m2" / "export" / "recipe.json").read_text())
    assert recipe["step"] == 3 and recipe["start"]["step"] == 6


def test_tokens_are_chosen_by_the_counts_that_are_named(tmp_path):
    """At each start without a checkpoint; a resumed run keeps them."""

    class Text:
        def counts(self, vocab_size):
            return np.ones(vocab_size, int)

    folder = tmp_path / "answers"
    folder.mkdir()
    counts = np.zeros(VOCAB, np.int64)
    counts[[9, 60, 33]] = 1, 2, 3
    np.save(folder / vocabulary.COUNTS, counts)
    given = (VOCAB, [Text()], str(tmp_path), str(folder))
    ids = draft_vocab(HeadsConfig(draft_vocab=3), *given)
    assert ids.tolist() == [9, 33, 60]
    np.save(tmp_path / DRAFT_VOCAB, ids)  # as `prepare.load` does
    counts[5] = 4
    np.save(folder / vocabulary.COUNTS, counts)
    assert draft_vocab(HeadsConfig(draft_vocab=3), *given, True).tolist() == [9, 33, 60]
    assert draft_vocab(HeadsConfig(draft_vocab=3), *given).tolist() == [5, 33, 60]
    with pytest.raises(UserError, match="should hold 4 ascending token ids below 64"):
        draft_vocab(HeadsConfig(draft_vocab=4), *given, True)
