"""Models whose weights are read in a GGUF file's own blocks: every number is near that of the unpacked ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import wide
from closeness import assert_close
from gguf_files import byte_level_metadata, gguf, random_blocks, shape_metadata, write

import medusa_jax
from medusa_jax import Options
from medusa_jax.commands.decode_report import describe
from medusa_jax.cpu import library
from medusa_jax.cpu.panels import Panels
from medusa_jax.errors import UserError
from medusa_jax.evaluate.weight_bytes import bytes_per_token, stored_as
from medusa_jax.interop.hub import resolve

native = pytest.mark.skipif(library() is None, reason="no C++ compiler")
D, F, HEADS, KV_HEADS = 256, 512, 4, 2
PROMPT = [5, 9, 4, 7, 12, 6, 8, 10, 11]


def blocks(kind, rows, inputs, rng):
    """A tensor of random blocks, of the size that weights have."""
    if kind is None:
        return (rng.standard_normal((rows, inputs)) / 20).astype(np.float32)
    stored = random_blocks(kind, rows, inputs, rng)
    # Scales as they are in models: otherwise one block of 60,000 is all that counts.
    at = {"Q6_K": 208}.get(kind, 0)
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    each = stored.reshape(rows, -1, size)
    top = 0.2 / {"Q8_0": 128, "Q4_K": 900, "Q6_K": 4000}.get(kind, 15)
    halves = rng.uniform(-top, top, each.shape[:2]).astype(np.float16)
    for place in [at] if kind in ("Q4_0", "Q5_0", "Q8_0", "Q6_K") else [0, 2]:
        each[..., place : place + 2] = halves[..., None].view(np.uint8)
    return each.reshape(rows, -1), gguf.GGMLQuantizationType[kind]


def model_file(path, tokenizer_json, kinds, tied=True):
    """A llama file of two layers; `kinds` are the types of its tensors, the embedding's first."""
    rng = np.random.default_rng(0)
    metadata = byte_level_metadata(tokenizer_json)
    vocab, K = len(metadata["tokenizer.ggml.tokens"]), D // HEADS * KV_HEADS
    embedding, q, k, v, out, gate, up, down = kinds
    tensors = {"token_embd.weight": blocks(embedding, vocab, D, rng)}
    tensors["output_norm.weight"] = np.ones(D, np.float32)
    if not tied:
        tensors["output.weight"] = blocks("Q6_K", vocab, D, rng)
    for i in range(2):
        layer = {
            "attn_q.weight": blocks(q, D, D, rng),
            "attn_k.weight": blocks(k, K, D, rng),
            "attn_v.weight": blocks(v, K, D, rng),
            "attn_output.weight": blocks(out, D, D, rng),
            "ffn_gate.weight": blocks(gate, F, D, rng),
            "ffn_up.weight": blocks(up, F, D, rng),
            "ffn_down.weight": blocks(down, D, F, rng),
            "attn_norm.weight": rng.uniform(0.5, 1, D).astype(np.float32),
            "ffn_norm.weight": rng.uniform(0.5, 1, D).astype(np.float32),
        }
        if not tied:  # as files with biases have them
            for part, n in (("q", D), ("k", K), ("v", K), ("output", D)):
                layer[f"attn_{part}.bias"] = rng.standard_normal(n).astype(np.float32)
        tensors |= {f"blk.{i}.{name}": tensor for name, tensor in layer.items()}
    shape = {"embedding_length": D, "feed_forward_length": F}
    return write(path, metadata | shape_metadata("llama", **shape), tensors)


@pytest.fixture
def tokenizer_json(byte_level_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "native")
    return (byte_level_dir / "tokenizer.json").read_text()


CASES = {
    "Q4_1 and Q8_0": ["Q8_0", *["Q4_1"] * 7],
    "as Q4_K_M": ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q4_K", "Q6_K"],
    "three in one": ["Q5_0", "Q5_1", "Q8_0", "Q4_0", None, "Q5_K", "Q4_0", None],
    "an embedding in float32": [None, *["Q4_0"] * 7],
}


@native
@pytest.mark.parametrize(
    ("case", "tied"),
    [
        ("Q4_1 and Q8_0", True),
        ("three in one", False),
        *wide(("as Q4_K_M", False), ("an embedding in float32", True)),
    ],
)
def test_every_number_is_near_that_of_unpacked_weights(
    case, tied, tmp_path, tokenizer_json
):
    """Hidden states and logits, of one new token and of several, and the text, drafted or not."""
    path = model_file(tmp_path / "model.gguf", tokenizer_json, CASES[case], tied)
    stored, floats = (
        medusa_jax.load(path, weights=weights) for weights in (None, "float32")
    )
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
    with pytest.raises(UserError, match="stored need dtype float32"):
        medusa_jax.load(path, weights="stored", dtype="bfloat16")
    with pytest.raises(UserError, match="stored need a GGUF file"):
        medusa_jax.load(weights="stored")


@native
def test_a_scale_that_is_no_number(tmp_path, tokenizer_json):
    path = model_file(tmp_path / "model.gguf", tokenizer_json, CASES["Q4_1 and Q8_0"])
    from medusa_jax.formats.gguf.reader import read_gguf

    tensor = read_gguf(path).tensors["blk.1.ffn_down.weight"]
    with open(path, "r+b") as file:
        file.seek(tensor.start + 20)  # the second block's scale
        file.write(np.float16(np.inf).tobytes())
    message = r"tensor 'blk.1.ffn_down.weight' contains NaN or infinity"
    with pytest.raises(UserError, match=message):
        medusa_jax.load(path)


def test_a_file_that_has_moved_is_followed(tmp_path, tokenizer_json):
    path = model_file(tmp_path / "model.gguf", tokenizer_json, CASES["Q4_1 and Q8_0"])
    directory = resolve(path)
    (tmp_path / "model.gguf").rename(tmp_path / "other.gguf")
    with pytest.raises(UserError, match="cannot be read"):
        medusa_jax.load(directory)
    assert resolve(str(tmp_path / "other.gguf")) == directory
    medusa_jax.load(directory)
