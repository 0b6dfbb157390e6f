"""Loading: what a device holds while a model is read is its part of the model and one layer more."""

import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from children import devices, printed_by
from closeness import assert_close
from live import Peak, shard_bytes
from tiny import random_params, write_heads, write_model
from training_setup import setup_of, tiny_config

import medusa_jax
from medusa_jax.api import load
from medusa_jax.config import LlamaConfig
from medusa_jax.cpu.panels import Panels
from medusa_jax.errors import UserError
from medusa_jax.files import hf, hf_writer, source
from medusa_jax.heads.vocabulary import GROUP, for_drafting
from medusa_jax.model import convert
from medusa_jax.model.stored import Codes
from medusa_jax.native import library
from medusa_jax.sharding import make_mesh
from medusa_jax.training import models
from medusa_jax.tree.tree import Tree

LAYERS = 12
SIZES = {"n_layers": LAYERS, "d_model": 64, "n_heads": 8, "n_kv_heads": 4, "head_dim": 8}
SIZES |= {"d_ff": 128}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("deep")
    write_model(path, **SIZES)
    return str(path)


@pytest.fixture
def peak(monkeypatch):
    """Looked at after every tensor that is read, and where a part is held in both forms."""
    most = Peak()
    for module, name in (
        (source, "_place"),
        (convert, "_prepared"),
        (convert, "_in_form"),
        (models, "quantise_backbone"),
    ):
        monkeypatch.setattr(module, name, most.watching(getattr(module, name)))
    return most


def largest_part(config, itemsize):
    """Bytes of a layer as it is stored; other parts are smaller."""
    c = config
    attention = 2 * c.d_model * c.head_dim * (c.n_heads + c.n_kv_heads)
    return itemsize * (attention + 3 * c.d_model * c.d_ff + 2 * c.d_model)


@pytest.mark.parametrize(
    ("products", "dtype", "weights"),
    [
        ("plain", "float32", None),
        ("plain", "bfloat16", None),
        ("native", "float32", None),
        ("native", "float32", "bfloat16"),
    ],
)
def test_loading_takes_the_model_and_one_layer(
    directory, peak, products, dtype, weights, monkeypatch
):
    """Fused only, and in panels; bfloat16 from a float32 file."""
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", products)
    form = {"dtype": dtype, "weights": weights}
    model = medusa_jax.load(directory, directory + "/heads", tree="none", **form)
    backbone = model.variables["backbone"]
    kernel = backbone["layers_0"]["mlp"]["down_proj"]["kernel"]
    assert isinstance(kernel, Panels) == (products == "native")
    held = shard_bytes(model.variables)
    itemsize = 2 if weights else model.dtype.itemsize
    layer = largest_part(model.config, itemsize)
    assert held > LAYERS * layer
    read = largest_part(model.config, model.dtype.itemsize)
    assert held <= peak.bytes <= held + 1.2 * read


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_bfloat16_with_native_products(tmp_path, monkeypatch):
    """Rounded parameters and float32 in between: so a drafted text is plain decoding's, bit for bit."""
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "native")
    write_model(tmp_path, head_dim=32)
    directory = str(tmp_path)
    files = directory, directory + "/heads"
    model = medusa_jax.load(*files, tree="chain:2", dtype="bfloat16")
    assert (model.dtype, model.storage.weights) == (jnp.float32, "bfloat16")
    assert model.lossless("greedy") == "bitwise"
    _, params = hf.load_backbone(directory, make_mesh())
    table = params["embed_tokens"]["embedding"]
    held = model.variables["backbone"]["embed_tokens"]["embedding"]
    assert held.dtype == jnp.float32 and (held != table).any()
    np.testing.assert_array_equal(held, table.astype(jnp.bfloat16))
    options = medusa_jax.Options(max_new_tokens=20, eos_ids=())
    [plain] = model.generate([[4, 5]], options, tree="none")
    [drafted] = model.generate([[4, 5]], options)
    assert plain.token_ids == drafted.token_ids


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantising_takes_the_quantised_model_and_one_layer(directory, peak, kind):
    cfg = tiny_config("", "medusa1")
    cfg.model.path, cfg.model.quantise = directory, kind
    setup = setup_of(cfg, make_mesh())
    held = shard_bytes(setup.frozen)
    layer = largest_part(hf.model_shape(directory), 4)
    assert held < LAYERS * layer / 2
    assert held <= peak.bytes <= held + 1.2 * layer


@pytest.mark.parametrize("tied", [True, *wide(False)])
@pytest.mark.parametrize(
    "products, weights", [("native", None), *wide(("plain", "int8"), ("plain", None))]
)
def test_a_shared_lm_head_is_read_in_columns(
    products, weights, tied, tmp_path, monkeypatch
):
    """That of a draft vocabulary is a smaller kernel in the form of the others; the text stays."""
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", products)
    config, params = write_model(tmp_path, tie_embeddings=tied)
    ids = np.arange(1, config.vocab_size, 2, dtype=np.int32)
    write_heads(tmp_path / "few", config, params, ids=ids)
    form = {"dtype": "float32", "weights": weights}
    model = medusa_jax.load(str(tmp_path), str(tmp_path / "few"), **form)
    kernel = model.variables["heads"][GROUP]["lm_head"]["kernel"]
    whole = model.variables["backbone"]["lm_head"]["kernel"]
    assert type(kernel) is type(whole)
    assert isinstance(whole, Codes) == (weights == "int8")
    assert isinstance(kernel, Panels) == (products == "native")
    x = np.random.default_rng(0).standard_normal((3, config.d_model)).astype(np.float32)
    seen = for_drafting(model.backbone, model.variables["heads"])
    logits = seen.lm_head(x)
    assert logits.shape == (3, len(ids))
    wanted = np.asarray(model.backbone.lm_head(x))[:, ids]
    if products == "native":  # drafts are int8 there, whatever the model is
        assert kernel.form == "int8" and whole.form == "float32"
        name = ("embed_tokens", "embedding") if tied else ("lm_head", "kernel")
        stored = params[name[0]][name[1]]
        kernel_DO = (stored.T if tied else stored)[:, ids]
        step = np.abs(kernel_DO).max(axis=0) / 127
        assert (np.abs(logits - wanted) <= 0.51 * step * np.abs(x).sum(1)[:, None]).all()
        heads = model.variables_by("typical")["heads"]  # unless they decide the text
        assert heads[GROUP]["lm_head"]["kernel"].form == "float32"
        assert_close(for_drafting(model.backbone, heads).lm_head(x), wanted)
    else:
        assert_close(logits, wanted)
    with pytest.raises(UserError, match=f"rank {len(ids)} exceeds the heads' draft vocab"):
        model.parse_tree(Tree.from_choices([[len(ids)]]))
    plain = medusa_jax.load(str(tmp_path), "none", **form)
    options = medusa_jax.Options(max_new_tokens=12)
    texts = [m.generate(["the cat"], [options])[0].token_ids for m in (model, plain)]
    assert texts[0] == texts[1]


# Drafters without heads by what `--drafter` says of them, from files.


def test_fields_of_a_spec_make_the_tree(directory):
    assert load(directory, "prompt_lookup:tokens=4").tree == Tree.copies(4)


def test_a_draft_model_needs_the_same_tokenizer(directory, tmp_path):
    """As many tokens, of which one is another."""
    write_model(tmp_path)
    model = load(str(tmp_path), f"draft_model:{tmp_path}")
    assert model.has_drafter and model.tree == model.drafter.default_tree
    file = tmp_path / "tokenizer.json"
    swapped = file.read_text().replace('"e":', '"#":').replace('"d":', '"e":')
    file.write_text(swapped.replace('"#":', '"d":'))
    with pytest.raises(UserError, match="has another tokenizer than the model"):
        load(str(directory), f"draft_model:{tmp_path}")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("draft_model", "--drafter draft_model:PATH"),
        ("draft_model:", "--drafter draft_model:PATH"),
        ("prompt_lookup:tokens=two", "the fields tokens, not 'tokens=two'"),
        ("prompt_lookup:tokens=0", "tokens is from 1"),
        ("prompt_lookup:tokens=2:tokens=3", "tokens is given twice"),
    ],
)
def test_bad_specs(spec, message, directory):
    with pytest.raises(UserError, match=message):
        load(str(directory), spec)


@pytest.mark.parametrize("spec", ["prompt_lookup", "draft_model:{}", "none"])
def test_there_are_no_heads_to_store(spec, directory):
    with pytest.raises(UserError, match="no heads are loaded"):
        load(directory, spec.format(directory), draft_weights="float32")


# 84 MB in float32, of which each of eight devices is to hold an eighth or a quarter.
CONFIG = LlamaConfig(
    vocab_size=8192, d_model=512, n_layers=4, n_heads=8, n_kv_heads=8, head_dim=64,
    d_ff=1408, max_position=64,
)  # fmt: skip

WATCHED = r"""
import gc, json, math, sys, tracemalloc

import jax

import medusa_jax
from live import Peak, on_a_device, shard_bytes
from medusa_jax.files import tensors
from medusa_jax.model import convert

on_host = 0


def host_bytes():
    # What a simulated device holds may be the very memory that was read.
    held = sum(on_a_device(x) * len(x.sharding.device_set) for x in jax.live_arrays())
    return tracemalloc.get_traced_memory()[0] - held


def watched_open(path):
    def watched(t):
        before = []

        def read(index):
            global on_host
            if len(index) < 2 or index[0].stop - index[0].start == 1:
                return t.read(index)  # vectors, and single rows for the fingerprint
            before.append(host_bytes())
            # Parts of this tensor that were read before and have not left the host.
            on_host = max(on_host, (before[-1] - before[0]) / (4 * math.prod(t.shape)))
            return t.read(index)

        return tensors.Tensor(t.file, t.shape, t.dtype, peak.watching(read))

    return {name: watched(t) for name, t in open_file(path).items()}


open_file, tensors.open_safetensors = tensors.open_safetensors, watched_open
prepare = convert._prepared
tracemalloc.start()


def loaded(mesh):
    global on_host, peak
    gc.collect()  # the model on another mesh
    on_host, peak = 0, Peak()
    convert._prepared = peak.watching(prepare)
    mesh = tuple(map(int, mesh.split(",")))
    model = medusa_jax.load(sys.argv[1], drafter="none", mesh=mesh, dtype="float32")
    leaves = jax.tree.leaves(model.variables["backbone"])
    return {
        "share": shard_bytes(leaves) / sum(x.nbytes for x in leaves),
        "most": peak.bytes / shard_bytes(leaves),
        "on host": on_host,
    }


print(json.dumps({mesh: loaded(mesh) for mesh in sys.argv[2:]}))
"""
MESHES = {"1,8,1": 1 / 8, "2,2,2": 1 / 4}


@pytest.mark.wide
def test_no_device_and_not_the_host_holds_a_whole_parameter(tmp_path, monkeypatch):
    """As stored, fused for decoding, or on the way from one to the other."""
    monkeypatch.setattr(hf_writer, "SHARD_BYTES", 20 * 10**6)
    hf_writer.save_backbone(str(tmp_path), CONFIG, random_params(CONFIG, 0), "float32")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    found = printed_by(WATCHED, tmp_path, *MESHES, xla_flags=devices(8))
    for mesh, share in MESHES.items():
        seen = found[mesh]
        assert seen["share"] == pytest.approx(share, rel=0.01)
        # Beside its share a device has a layer twice, or the embedding that is being read.
        assert 1 <= seen["most"] < 1.4
        assert seen["on host"] <= share + 0.01  # of the tensor that is read
