"""Tensors of every block type, read back and as a model's weights, give nearly the numbers of unpacked ones."""

import struct
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from closeness import assert_close
from family import small_heads
from gguf_files import (
    HEADS,
    KV_HEADS,
    SCALES,
    byte_level_metadata,
    gguf,
    llama_shapes,
    random_blocks,
    shape_metadata,
    write,
)
from planted import drafted, plain_texts, texts_of
from refusals import refused
from tiny import random_params, tiny_arch, write_heads
from trees import random_tree

import medusa_jax
from medusa_jax import Options, compiler
from medusa_jax.commands.decode_report import describe, draft_weights
from medusa_jax.cpu.panels import Panels
from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.evaluate.weight_bytes import bytes_per_token, stored_as
from medusa_jax.files.gguf.reader import read_gguf
from medusa_jax.files.hf_config import read_config
from medusa_jax.files.hf_writer import save_backbone
from medusa_jax.files.hub import resolve
from medusa_jax.native import library

native = pytest.mark.skipif(library() is None, reason="no C++ compiler")
D, F = 256, 512
PROMPT = [5, 9, 4, 7, 12, 6, 8, 10, 11]


def blocks(kind, rows, inputs, rng):
    """A tensor of random blocks, of the size that weights have."""
    if kind is None:
        return (rng.standard_normal((rows, inputs)) / 20).astype(np.float32)
    stored = random_blocks(kind, rows, inputs, rng)
    # Scales as they are in models: otherwise one block of 60,000 is all that counts.
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    each = stored.reshape(rows, -1, size)
    top = 0.2 / {"Q8_0": 128, "Q4_K": 900, "Q6_K": 4000}.get(kind, 15)
    halves = rng.uniform(-top, top, each.shape[:2]).astype(np.float16)
    for place in SCALES.get(kind, (0,)):
        each[..., place : place + 2] = halves[..., None].view(np.uint8)
    return each.reshape(rows, -1), gguf.GGMLQuantizationType[kind]


# The matrices of `CASES`, in their order.
PARTS = ["token_embd", *(f"attn_{name}" for name in ("q", "k", "v", "output"))]
PARTS += [f"ffn_{name}" for name in ("gate", "up", "down")]


def model_file(path, tokenizer_json, kinds, tied=True, more=()):
    """A llama file of two layers; untied ones have biases of the attention.

    Args:
      kinds: the types of `PARTS`.
      more: of the metadata.
    """
    rng = np.random.default_rng(0)
    metadata = byte_level_metadata(tokenizer_json) | dict(more)
    shapes = llama_shapes(len(metadata["tokenizer.ggml.tokens"]), D, F)
    tensors, kind_of = {}, dict(zip(PARTS, kinds))
    for name, shape in shapes.items():
        part = name.split(".")[-2]
        if part in kind_of:
            tensors[name] = blocks(kind_of[part], *shape, rng)
        else:
            tensors[name] = rng.uniform(0.5, 1, shape).astype(np.float32)
        if not tied and "attn" in part and part in kind_of:
            bias = rng.standard_normal(shape[0]).astype(np.float32)
            tensors[name.replace("weight", "bias")] = bias
    if not tied:
        tensors["output.weight"] = blocks("Q6_K", *shapes["token_embd.weight"], rng)
    shape = {"embedding_length": D, "feed_forward_length": F}
    return write(path, metadata | shape_metadata("llama", **shape), tensors)


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "native")


CASES = {
    "Q4_1 and Q8_0": ["Q8_0", *["Q4_1"] * 7],
    "as Q4_K_M": ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q4_K", "Q6_K"],
    "three in one": ["Q5_0", "Q5_1", "Q8_0", "Q4_0", None, "Q5_K", "Q4_0", None],
    "an embedding in float32": [None, *["Q4_0"] * 7],
}


@native
@pytest.mark.parametrize("has_heads", [True, False])
def test_products_are_asked_for_before_any_is_needed(
    has_heads, tmp_path, tokenizer_json, monkeypatch
):
    """The products of the file's blocks and of its heads, and no others."""
    path = model_file(tmp_path / "model.gguf", tokenizer_json, CASES["three in one"], False)
    config, asked = read_config(resolve(path)), set()
    write_heads(tmp_path / "heads", config, random_params(config, 0))
    drafter = tmp_path / "heads" if has_heads else "none"
    library()
    monkeypatch.setattr(compiler, "library_file", asked.add)
    model = medusa_jax.load(path, drafter, allow_other_base=True)
    kernels = jax.tree.leaves(
        model.variables, is_leaf=lambda leaf: isinstance(leaf, Panels)
    )
    used = {kernel.form for kernel in kernels if isinstance(kernel, Panels)}
    assert len(used) == 7 + has_heads
    assert asked == {f"{form}_{0 if form == 'float32' else 16}" for form in used}


@native
@pytest.mark.parametrize(
    ("case", "tied"),
    [
        ("Q4_1 and Q8_0", True),
        *wide(("three in one", False)),
        *wide(("as Q4_K_M", False), ("an embedding in float32", True)),
    ],
)
def test_every_number_is_near_that_of_unpacked_weights(
    case, tied, tmp_path, tokenizer_json
):
    """Hidden states and logits, of one new token and of several, and the text, drafted or not."""
    path = model_file(tmp_path / "model.gguf", tokenizer_json, CASES[case], tied)
    stored = medusa_jax.load(path)
    floats = medusa_jax.load(path, weights="float32")
    assert (stored.storage.weights, floats.storage.weights) == ("stored", "")
    options = Options(24, temperature=1.0, eos_ids=())
    texts = [model.generate([PROMPT], options)[0] for model in (stored, floats)]
    assert texts[0].token_ids == texts[1].token_ids and len(set(texts[0].token_ids)) > 3
    for tokens in (PROMPT[:1], PROMPT):
        tokens_BT = jnp.asarray([tokens])
        args = (tokens_BT, jnp.arange(len(tokens))[None], jnp.ones_like(tokens_BT))
        hidden = [m.backbone.forward(*args) for m in (stored, floats)]
        logits = [m.backbone.lm_head(h) for m, h in zip((stored, floats), hidden)]
        assert_close(*hidden, roundings=8192)
        assert_close(*logits, roundings=8192)
    [drafted] = medusa_jax.load(path, "prompt_lookup").generate([PROMPT], options)
    assert drafted.token_ids == texts[0].token_ids
    facts = describe(stored, texts[0], "sampled", options, None)
    assert (facts["weights"], facts["activations"]) == ("stored", 16)
    few = medusa_jax.load(path, weights="float32", activations=8)
    assert describe(few, texts[0], "sampled", options, None)["activations"] is None
    assert set(stored_as(stored)) >= {kind for kind in CASES[case] if kind}
    assert set(stored_as(floats)) == {"float32"}
    assert bytes_per_token(stored, 9) < bytes_per_token(floats, 9)
    if tied and CASES[case][0]:
        params = stored.variables["backbone"]
        table, head = params["embed_tokens"]["embedding"], params["lm_head"]["kernel"]
        assert isinstance(table, Panels) and table.panels is head.panels
    copies = list((tmp_path / "cache").rglob("*.safetensors"))
    assert not copies, "nothing in float32 is kept"


KEYS = D // HEADS * KV_HEADS
AFTER = {"post_attention_norm": (D,), "post_ffw_norm": (D,)}
WINDOW = {"attention.sliding_window": 4}
SCALED = {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 0.3}
FUSED = {"attn_qkv": (D + 2 * KEYS, D), "ffn_up": (2 * F, D)}
# Metadata of a family's files, and the tensors of a layer that are added or (None) missing.
SHAPES = {
    "smollm3": ({"block_count": 4}, {}),
    "granite": (SCALED | {"attention.scale": 0.2}, {}),
    "phi3": (
        WINDOW | {"rope.dimension_count": 48},
        FUSED | dict.fromkeys(("attn_q", "attn_k", "attn_v", "ffn_gate")),
    ),
    "olmo2": (
        WINDOW | {"block_count": 4},
        AFTER
        | {"attn_norm": None, "ffn_norm": None}
        | {"attn_q_norm": (D,), "attn_k_norm": (KEYS,)},
    ),
    "gemma3": (
        WINDOW | {"block_count": 6},
        AFTER | {"attn_q_norm": (D // HEADS,), "attn_k_norm": (D // HEADS,)},
    ),
}
# Every block that has a kernel, in one file.
KINDS = dict(zip(PARTS, ["Q6_K", "Q4_K", "Q5_0", "Q8_0", "Q4_0", "Q4_K", "Q5_0", "Q6_K"]))
KINDS |= {"attn_qkv": "Q5_0", "output": "Q6_K"}
TREES = {"medusa": "cartesian:2,2,1", "eagle3": "cartesian:2,2,1", "dspark": "chain:3"}


def shaped_file(path, tokenizer_json, arch):
    """A file of a family whose matrices are blocks."""
    keys, changes = SHAPES[arch]
    rng, metadata = np.random.default_rng(0), byte_level_metadata(tokenizer_json)
    shapes = llama_shapes(len(metadata["tokenizer.ggml.tokens"]), D, F)
    layer = {n.split(".")[2]: s for n, s in shapes.items() if n.startswith("blk.0.")}
    shapes = {n: s for n, s in shapes.items() if not n.startswith("blk.")}
    shapes["output.weight"] = shapes["token_embd.weight"]
    for i in range(keys.get("block_count", 2)):
        changed = {n: s for n, s in (layer | changes).items() if s}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in changed.items()}
    tensors = {
        name: blocks(KINDS[name.split(".")[-2]], *shape, rng)
        if len(shape) > 1
        else rng.uniform(0.5, 1.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    sizes = {"embedding_length": D, "feed_forward_length": F}
    metadata |= shape_metadata(arch, **sizes | keys)
    return write(path, metadata, tensors, arch)


@native
@pytest.mark.parametrize("arch", wide(*SHAPES))
def test_blocks_of_every_shape(arch, tmp_path, tokenizer_json):
    """No matrix is unpacked, numbers are near those of unpacked ones, and drafted text is plain bit for bit."""
    path = shaped_file(tmp_path / "model.gguf", tokenizer_json, arch)
    model = medusa_jax.load(path, "none")
    parts = jax.tree.leaves(
        model.variables["backbone"], is_leaf=lambda x: isinstance(x, Panels)
    )
    kinds = {t.kind.name for t in read_gguf(path).tensors.values() if len(t.shape) > 1}
    assert {x.form for x in parts if isinstance(x, Panels)} == kinds
    assert {x.ndim for x in parts if not isinstance(x, Panels)} == {1}
    floats = medusa_jax.load(path, "none", weights="float32")
    ones = jnp.ones((1, len(PROMPT)), int)
    args = jnp.asarray([PROMPT]), jnp.arange(len(PROMPT))[None], ones
    assert_close(*(m.backbone.forward(*args) for m in (model, floats)), roundings=8192)
    request = DecodeRequest([PROMPT, PROMPT[:1], PROMPT[:4]], [40, 31, 40])
    given = model.config, (None, model.engine().llama, model.variables["backbone"]), request
    plain = plain_texts(*given)
    progress = drafted(*given, plain, random_tree(np.random.default_rng(0), 12, 4), 0)
    assert texts_of(progress) == plain and len({*plain[0]}) > 3
    assert np.asarray(progress.histogram_BL)[:, 1:].sum() > 0


@native
@pytest.mark.parametrize(("arch", "name"), wide(*product(SHAPES, TREES)))
def test_heads_on_blocks_of_every_shape(arch, name, tmp_path, tokenizer_json):
    """Drafted text is plain decoding's, bit for bit."""
    path = shaped_file(tmp_path / "model.gguf", tokenizer_json, arch)
    config = read_config(resolve(path))
    params = jax.tree.map(np.float32, random_params(config, 0))
    heads = small_heads(name, lm_head="own")
    write_heads(tmp_path / "heads", config, params, heads, seed=1)
    form = {"tree": TREES[name], "allow_other_base": True}
    model = medusa_jax.load(path, tmp_path / "heads", **form)
    prompts, options = [PROMPT, PROMPT[:1], PROMPT[:4]], Options(40, eos_ids=())
    plain, drafts = (model.generate(prompts, options, tree=t) for t in ("none", None))
    assert [r.token_ids for r in drafts] == [r.token_ids for r in plain]


@native
def test_a_draft_model_is_stored_in_types_of_its_own(tmp_path, tokenizer_json):
    path = model_file(tmp_path / "model.gguf", tokenizer_json, CASES["Q4_1 and Q8_0"])
    save_backbone(str(tmp_path), arch := tiny_arch(), random_params(arch, 0), "float32")
    drafters = [medusa_jax.load(path, f"draft_model:{name}") for name in (path, tmp_path)]
    kinds = [draft_weights(model, "greedy") for model in drafters]
    assert kinds == ["stored", "float32"]


def test_where_blocks_are_not_read_they_are_unpacked(
    tmp_path, tokenizer_json, monkeypatch, capsys
):
    path = model_file(tmp_path / "model.gguf", tokenizer_json, CASES["Q4_1 and Q8_0"])
    line = "the file's weights are unpacked"
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "plain")
    for asked in (None, "stored"):
        assert medusa_jax.load(path, weights=asked).storage.weights == ""
        assert line in capsys.readouterr().err
    medusa_jax.load(path, weights="float32")
    assert line not in capsys.readouterr().err
    half = medusa_jax.load(path, dtype="bfloat16")
    types = {x.dtype.name for x in jax.tree.leaves(half.variables["backbone"])}
    assert types == {"bfloat16"}
    with refused("stored needs dtype float32"):
        medusa_jax.load(path, weights="stored", dtype="bfloat16")
    with refused("stored needs a GGUF file"):
        medusa_jax.load(weights="stored")


@native
def test_a_scale_that_is_no_number(tmp_path, tokenizer_json):
    path = model_file(tmp_path / "model.gguf", tokenizer_json, CASES["Q4_1 and Q8_0"])
    tensor = read_gguf(path).tensors["blk.1.ffn_down.weight"]
    with open(path, "r+b") as file:
        file.seek(tensor.start + 20)  # the second block's scale
        file.write(np.float16(np.inf).tobytes())
    with refused("tensor 'blk.1.ffn_down.weight' contains NaN or infinity"):
        medusa_jax.load(path)


def test_a_file_that_has_moved_is_followed(tmp_path, tokenizer_json):
    path = model_file(tmp_path / "model.gguf", tokenizer_json, CASES["Q4_1 and Q8_0"])
    directory = resolve(path)
    (tmp_path / "model.gguf").rename(tmp_path / "other.gguf")
    with refused("cannot be read"):
        medusa_jax.load(directory)
    assert resolve(str(tmp_path / "other.gguf")) == directory
    medusa_jax.load(directory)


Kind = gguf.GGMLQuantizationType
ROUNDING = {"F32": 0.0, "F16": 2**-12, "BF16": 2**-9, "Q8_0": 0.51 / 254}
ROUNDING |= {"Q5_0": 1.01 / 32, "Q5_1": 0.51 / 31, "Q4_0": 1.01 / 16, "Q4_1": 0.51 / 15}


@pytest.mark.parametrize("name", ROUNDING)
def test_within_the_rounding_of_the_type(name, tmp_path):
    values = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    path = write(tmp_path / "a.gguf", {}, {"x": (values, Kind[name]), "y": values[:, 0]})
    file = read_gguf(path)
    assert file.tensors["x"].shape == (6, 96)
    error = np.abs(file.tensors["x"].unpacked() - values).reshape(-1, 32)
    largest = np.abs(values).reshape(-1, 32).max(1, keepdims=True)
    assert (error <= ROUNDING[name] * 2 * largest).all()
    assert error.max() > 0 or name == "F32"
    np.testing.assert_array_equal(file.tensors["y"].unpacked(), values[:, 0])


def test_every_type_as_transformers_unpacks_it(tmp_path):
    """Random blocks of every type that both know, those left out whose numbers are not finite."""
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.gguf.dequant")
    rng = np.random.default_rng(0)
    for number in theirs.GGML_BLOCK:
        kind = Kind(number)
        _, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (400, size), np.uint8)
        with np.errstate(all="ignore"):
            finite = np.isfinite(gguf.dequantize(blocks, kind)).all(1)
        blocks = blocks[finite][:64]
        path = write(tmp_path / "a.gguf", {}, {"x": (blocks, kind)})
        ours = read_gguf(path).tensors["x"].unpacked()
        expected = theirs.dequantize(torch.from_numpy(blocks), number).numpy()
        np.testing.assert_allclose(
            ours, expected.reshape(ours.shape), rtol=1e-6, err_msg=kind.name
        )
        assert len(blocks) == 64


def test_a_type_without_numbers_is_refused_by_name(tmp_path):
    path = write(tmp_path / "a.gguf", {}, {"x": np.arange(8, dtype=np.int32)})
    with refused(f"{path}: tensor 'x' .* of type 26, which the"):
        read_gguf(path)


@pytest.fixture
def file(tokenizer_json, tmp_path):
    """A tied llama model in blocks of 8 bits, its norms in float32."""
    more = {"general.file_type": 7}
    return Path(model_file(tmp_path / "a.gguf", tokenizer_json, ["Q8_0"] * 8, more=more))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"),
        (b"llama.rope.freq_base", b"tokenizer.ggml.model"),
    ],
)
def test_a_key_or_tensor_that_occurs_twice(old, new, file):
    data = file.read_bytes()
    assert len(old) == len(new) and data.count(old) == 1 and new in data
    file.unlink()
    file.write_bytes(data.replace(old, new))
    with refused(f"'{new.decode()}' occurs twice"):
        read_gguf(str(file))


@pytest.mark.parametrize("shape", [(63, 2), (64, 0)])
def test_a_shape_that_is_not_made_of_blocks(shape, tmp_path):
    path = tmp_path / "a.gguf"
    tensor = np.ones((2, 64), np.float32), Kind.Q8_0
    data = Path(write(path, {}, {"x": tensor})).read_bytes()
    right = struct.pack("<QQ", 64, 2)
    assert data.count(right) == 1
    path.write_bytes(data.replace(right, struct.pack("<QQ", *shape)))
    with refused("'x' of shape .* is not made of blocks of 32"):
        read_gguf(str(path))
