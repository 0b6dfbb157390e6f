"""speculators' hs_*.safetensors as training data: the same losses as from our own hidden states, or a sentence."""

import json

import datasets
import jax
import ml_dtypes
import numpy as np
import pytest
from closeness import assert_close
from safetensors.numpy import save_file
from training_setup import stage_of, texts_of, tiny_config

from medusa_jax.commands.train import override
from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import Backbone
from medusa_jax.heads.eagle3 import Eagle3Config
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.sharding import make_mesh
from medusa_jax.training import checks, trainer
from medusa_jax.training.data import features

TAPS, L = (0, 0, 1), 1
N = 24


def samples():
    """(tokens, counted) of N texts."""
    rng = np.random.default_rng(4)
    for _ in range(N):
        n = int(rng.integers(6, 15))
        yield rng.integers(0, 64, n), np.arange(n) >= rng.integers(0, 3)


def backbone():
    """The random backbone of a run without `model.path`."""
    cfg = tiny_config("", "medusa1")
    params = init_params(cfg.model.arch, jax.random.key(cfg.train.seed))
    params["norm"]["scale"] = params["norm"]["scale"] * 1.5
    return cfg.model.arch, params


def streams(arch, params, tokens):
    """[T, 4, D]: what enters the tapped layers and what leaves the last."""
    tapped = Backbone(Llama(arch, taps=(*TAPS, L)), params)
    rows = (tokens[None], np.arange(len(tokens))[None], np.ones((1, len(tokens)), int))
    hidden_TE = np.asarray(tapped.forward(*rows))[0]
    return hidden_TE.reshape(len(tokens), 5, -1)[:, 1:]


def write_states(directory, key="token_ids", mask=True, kind=np.float32):
    directory.mkdir(parents=True, exist_ok=True)
    arch, params = backbone()
    for i, (tokens, counted) in enumerate(samples()):
        arrays = {"hidden_states": streams(arch, params, tokens).astype(kind), key: tokens}
        if mask:
            arrays["loss_mask"] = counted.astype(np.int64)
        save_file(arrays, directory / f"hs_{i}.safetensors")
    return directory


def write_dataset(directory, changed=None):
    rows = [
        {"input_ids": t.tolist(), "loss_mask": c.astype(int).tolist()} for t, c in samples()
    ]
    datasets.Dataset.from_list(changed or rows).save_to_disk(str(directory))


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """A source whose files hold all."""
    return write_states(tmp_path_factory.mktemp("states"))


def config(source, workdir, model="", **train):
    cfg = tiny_config(str(source), "medusa1", steps=8, eval_every=8, **train)
    cfg.data.packing, cfg.workdir = "first_fit", str(workdir)
    cfg.heads = Eagle3Config(n_heads=3, lm_head="own")
    cfg.train.levels, cfg.train.teacher_weight, cfg.train.label_weight = 3, 1.0, 0.0
    cfg.model.path = str(model)
    workdir.mkdir(parents=True, exist_ok=True)
    return cfg


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The backbone on disk."""
    from medusa_jax.interop.hf_writer import save_backbone

    path = tmp_path_factory.mktemp("model")
    save_backbone(str(path), *backbone(), "float32")
    return path


def losses(cfg):
    trainer.train(cfg)
    with open(f"{cfg.workdir}/log.jsonl", encoding="utf-8") as file:
        return [json.loads(line)["loss"] for line in file]


def test_training_from_them_is_training_from_our_own_states(states, model, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    texts, counted = zip(*samples())
    np.save(tokens / "tokens.npy", np.concatenate(texts).astype(np.int32))
    np.save(tokens / "counted.npy", np.concatenate(counted))
    np.save(tokens / "doc_starts.npy", np.cumsum([0, *map(len, texts[:-1])]))
    found = {}
    for source in (tokens, states):
        cfg = config(source, tmp_path / f"run-{source.name}", model)
        cfg.data.eval_source, cfg.data.eval_samples = str(source), N
        found[source] = losses(cfg)
    assert len(found[tokens]) == len(found[states]) == 9
    assert found[tokens][0] != found[tokens][7]
    np.testing.assert_allclose(found[states], found[tokens], rtol=1e-4)


def rows_of(source, tmp_path):
    """The batch of all rows of a source."""
    cfg = config(source, tmp_path / "rows")
    cfg = checks.settle(cfg, cfg.model.arch, make_mesh())
    [text] = texts_of(cfg)
    frozen = {"backbone": backbone()[1]}
    cache = features.Cache(cfg.data, "", [], stage_of(cfg), frozen, make_mesh())
    rows = cache.rows(text, 8)
    return cfg, rows.batch(0, rows.rows)


def test_masks_of_the_dataset_and_half_the_bits(states, tmp_path):
    """As speculators lays them out: states below the dataset that has the masks."""
    write_states(tmp_path / "hidden_states", "input_ids", False, ml_dtypes.bfloat16)
    write_dataset(tmp_path)
    _, wide = rows_of(states, tmp_path)
    for source in (tmp_path, tmp_path / "hidden_states"):
        cfg, batch = rows_of(source, tmp_path)
        assert cfg.data.cache_features == "bfloat16"
        assert batch["hidden"].dtype == ml_dtypes.bfloat16
        for name in ("tokens", "counted", "segment_ids"):
            np.testing.assert_array_equal(batch[name], wide[name])
        assert_close(batch["hidden"].astype(np.float32), wide["hidden"], 2, "bfloat16")


def test_files_that_are_wrong_are_refused(tmp_path):
    (tokens, counted), *_ = samples()
    T = len(tokens)
    good = {"hidden_states": np.zeros((T, 4, 16), np.float32), "token_ids": tokens}
    good["loss_mask"] = counted.astype(np.int64)
    flat, long = np.zeros((T, 48), np.float32), np.zeros((T + 1, 4, 16), np.float32)
    few, endless = np.zeros((T, 3, 16), np.float32), np.full((T, 4, 16), np.inf, np.float32)
    folder = tmp_path / "bad"
    folder.mkdir()
    for match, changes in (
        ("a key that is not known: 'extra'", {"extra": tokens}),
        ("should have the keys hidden_states and one of", {"token_ids": None}),
        ("should have the keys hidden_states and one of", {"input_ids": tokens}),
        (r"'hidden_states' .* is float32\[\d+, 48\]", {"hidden_states": flat}),
        ("'hidden_states' .* not .*, n, D", {"hidden_states": long}),
        ("has 3 hidden states of size 16 .* need 4 of 16", {"hidden_states": few}),
        ("not finite", {"hidden_states": endless}),
        ("'token_ids' .* whole numbers", {"token_ids": tokens.astype(np.float32)}),
        ("vocabulary has 64", {"token_ids": tokens + 64}),
        ("loss_mask in .* of 1 and 0", {"loss_mask": np.full(T, 2)}),
        ("loss_mask in .* of 1 and 0", {"loss_mask": np.ones(T + 1, int)}),
        ("has no loss_mask, and neither", {"loss_mask": None}),
    ):
        arrays = {key: x for key, x in (good | changes).items() if x is not None}
        save_file(arrays, folder / "hs_0.safetensors")
        with pytest.raises(UserError, match=match):
            rows_of(folder, tmp_path)
    write_dataset(folder, [{"input_ids": [1, 2], "loss_mask": [1, 1]}])
    with pytest.raises(UserError, match="row 0 of its dataset have different tokens"):
        rows_of(folder, tmp_path)
    (folder / "hs_0.safetensors").rename(folder / "hs_5.safetensors")
    with pytest.raises(UserError, match="has no row 5 of"):
        rows_of(folder, tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("data.cache_features", "float8", "leave data.cache_features empty"),
        ("data.eval_source", "elsewhere", "for all of data.source and data.eval_source"),
        ("train.stage", "medusa2", "medusa1, not medusa2"),
    ],
)
def test_configurations_that_contradict_them(states, tmp_path, field, value, match):
    cfg = config(states, tmp_path)
    override(cfg, field, value)
    with pytest.raises(UserError, match=match):
        checks.settle(cfg, cfg.model.arch, make_mesh())
