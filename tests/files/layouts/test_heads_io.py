"""Heads in our own format: written and read back, in a byte a weight as well, and refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_files import WIDER as LLAMA
from refusals import refused
from safetensors.numpy import load_file, save_file

from medusa_jax.config import HeadsConfig
from medusa_jax.files.fingerprint import fingerprint
from medusa_jax.files.layouts import heads_io, native_heads
from medusa_jax.heads.registry import make_drafter
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.sharding import make_mesh
from medusa_jax.tree.files import TreeFile


@pytest.fixture(scope="module")
def base():
    return Backbone(Llama(LLAMA), init_params(LLAMA, jax.random.key(0)))


def make(base, **fields):
    heads = HeadsConfig(**({"n_heads": 3, "n_layers": 2, "rank": 4} | fields))
    return heads, make_drafter(heads, LLAMA).init(jax.random.key(1), base)


def save(path, base, heads, params, dtype=None, recipe={"steps": 7}):  # noqa: B006
    record = native_heads.base_record(LLAMA, fingerprint(LLAMA, base.params))
    given = {"base": record, "recipe": recipe, "dtype": dtype}
    native_heads.save_heads(str(path), heads, params, **given)
    return path, heads, params


@pytest.fixture
def saved(base, tmp_path):
    return save(tmp_path, base, *make(base))


def load(path, llama=LLAMA, **options):
    return heads_io.load_heads(str(path), llama, make_mesh(), **options)


def fails(match, path, *args, **options):
    with refused(match):
        load(path, *args, **options)


def test_other_heads_do_not_keep_what_was_measured(base, tmp_path, capsys):
    """As after further training: a certificate goes, a tree stays without its figures; the same heads keep both."""
    _, heads, params = save(tmp_path, base, *make(base))
    (tmp_path / "certificate").mkdir()
    certificate = tmp_path / native_heads.CERTIFICATE
    certificate.write_text("x")
    fitted = {"choices": [[0]], "evidence": {"ladder": [], "positions": 9}}
    (tmp_path / "tree.json").write_text(json.dumps(fitted))
    save(tmp_path, base, heads, params)
    assert certificate.exists()
    assert TreeFile.read(tmp_path / "tree.json").content["evidence"]
    other = jax.tree.map(lambda x: x + 1, params)
    save(tmp_path, base, heads, other)
    assert not certificate.parent.exists()
    assert json.loads((tmp_path / "tree.json").read_text()) == {"choices": [[0]]}
    assert TreeFile.read(tmp_path / "tree.json").content["choices"] == [[0]]
    assert "its tree is kept, without figures" in capsys.readouterr().err
    (tmp_path / "tree.json").write_text("[[0]]")
    save(tmp_path, base, heads, params)
    assert (tmp_path / "tree.json").read_text() == "[[0]]"


@pytest.mark.parametrize("lm_head", ["own", "shared", "low_rank"])
def test_round_trip(lm_head, base, tmp_path):
    recipe = {"a": [1, "é"]}
    _, heads, params = save(tmp_path, base, *make(base, lm_head=lm_head), recipe=recipe)
    mark = fingerprint(LLAMA, base.params)
    again, loaded, meta = load(tmp_path, fingerprint=mark)
    assert again == heads
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert meta["recipe"] == recipe and meta["base"]["fingerprint"] == mark
    assert sorted(p.name for p in tmp_path.iterdir()) == ["heads.json", "heads.safetensors"]
    save(tmp_path, base, heads, params, "bfloat16")
    stored = load_file(tmp_path / "heads.safetensors")
    assert {x.dtype.name for x in stored.values()} == {"bfloat16"}
    loaded = load(tmp_path, dtype=jnp.bfloat16)[1]
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {jnp.dtype("bfloat16")}


def test_kernels_in_a_byte_a_weight(base, tmp_path):
    """Within half a step of every column; a column of zeros stays one; codes belong to their scales."""
    heads, params = make(base, lm_head="shared", n_heads=2)
    params = jax.tree.map(np.array, params)
    params["heads_1"]["layers_0"]["kernel"][:, 3] = 0
    save(tmp_path, base, heads, params, "int8")
    stored, again = load_file(file := tmp_path / "heads.safetensors"), load(tmp_path)[1]
    assert stored["heads_0/layers_1/kernel/codes"].dtype == np.int8
    assert file.stat().st_size < 1.5 * sum(x.size for x in jax.tree.leaves(params))
    for layer, found in zip(params["heads_1"].values(), again["heads_1"].values()):
        step = np.abs(layer["kernel"]).max(axis=0) / 127
        assert (np.abs(found["kernel"] - layer["kernel"]) <= step * 0.5001).all()
        np.testing.assert_allclose(found["bias"], layer["bias"], rtol=2**-8)
    for part, array in (
        ("scales", None),
        ("codes", np.zeros((32, 32), np.float32)),
        ("scales", np.zeros((1, 31), np.float32)),
    ):
        name = f"heads_1/layers_0/kernel/{part}"
        state = {key: x for key, x in stored.items() if key != name}
        save_file(state | ({} if array is None else {name: array}), file)
        fails("needs codes in int8", tmp_path)


def test_deeper_heads_are_not_read(saved):
    """They may even be damaged."""
    path, _, params = saved
    file = path / "heads.safetensors"
    spoilt = {"heads_2/layers_1/bias": np.full(32, np.nan, np.float32)}
    save_file(load_file(file) | spoilt, file)
    fails("'heads_2/layers_1/bias' contains NaN or infinity", path)
    heads, loaded, _ = load(path, n_heads=2)
    assert heads.n_heads == 2
    few = {name: params[name] for name in ("heads_0", "heads_1")}
    jax.tree.map(np.testing.assert_array_equal, loaded, few)
    fails("is from 1 to 3, not 4", path, n_heads=4)


def test_another_backbone(saved):
    path, _, _ = saved
    wider = dataclasses.replace(LLAMA, d_model=48)
    fails("made for width 32 and vocabulary 64, the model has width 48", path, wider)
    larger = dataclasses.replace(LLAMA, vocab_size=65)
    fails("vocabulary 64, the model has width 32 and vocabulary 65", path, larger)
    mark = json.loads((path / "heads.json").read_text())["base"]["fingerprint"]
    fails(f"fingerprint {mark}, this one has 0123", path, fingerprint="0123")
    assert load(path)[0].n_heads == 3


KERNEL = "heads_1/layers_0/kernel"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({KERNEL: None}, rf"key '{KERNEL}' of shape \[32, 32\] is missing from .*heads\.safet"),
        ({KERNEL: np.zeros((32, 31), np.float32)}, rf"'{KERNEL}' .* \[32, 31\], .* \[32, 32\]"),
        ({"heads_0/other": np.zeros(3, np.float32)}, "no place for: 'heads_0/other'"),
        ({KERNEL: np.zeros((32, 32), np.int8)}, rf"'{KERNEL}' .* stored as int8; only float64"),
    ],
)  # fmt: skip
def test_keys_that_contradict(changes, match, saved):
    path, _, _ = saved
    file = path / "heads.safetensors"
    state = load_file(file) | changes
    save_file({name: x for name, x in state.items() if x is not None}, file)
    fails(match, path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": 2}, "has format 2, this version reads 1"),
        ({"base": {}}, r"heads\.json: base does not say d_model"),
        ({"base": {"d_model": 32, "vocab_size": 64}}, "base does not say fingerprint"),
        ({"heads": {"depth": 1}}, "a field under heads is one of .*, not 'depth'"),
        ({"heads": {"n_heads": True}}, "heads.n_heads should be int, not True"),
        ({"heads": {"n_layers": -1}}, "heads.n_layers .* -1"),
        ({"heads": {"drafter": "medussa"}}, "not 'medussa'"),
        ({"heads": {"n_heads": 5}}, "'heads_3/layers_0/bias' .* is missing"),
    ],
)
def test_descriptions_that_cannot_be_read(changes, match, saved):
    path, _, _ = saved
    file = path / "heads.json"
    good = json.loads(file.read_text())
    if fields := changes.get("heads"):
        changes = {"heads": good["heads"] | fields}
    file.write_text(json.dumps(good | changes))
    fails(match, path)
