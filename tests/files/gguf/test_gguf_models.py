"""Whole GGUF files as models: every family, against the same model saved for Hugging Face."""

import itertools
import json
import math
import os
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from gguf_files import (
    HEADS,
    KV_HEADS,
    LAYERS,
    D,
    F,
    byte_level_metadata,
    bytes_metadata,
    gguf,
    llama_tensors,
    shape_metadata,
    tiny,
    write,
)
from numpy_layers import llama3_divisors
from refusals import refused

import medusa_jax
from medusa_jax import Options
from medusa_jax.api.load import open_model
from medusa_jax.config import LlamaConfig
from medusa_jax.files.gguf import architecture, convert
from medusa_jax.files.gguf.directory import make_directory
from medusa_jax.files.gguf.reader import read_gguf
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.hf_config import parse_config, read_config
from medusa_jax.files.hf_writer import save_backbone
from medusa_jax.files.hub import resolve
from medusa_jax.files.tensor import read_whole
from medusa_jax.files.tensors import open_checkpoint
from medusa_jax.files.text_defaults import generation_config
from medusa_jax.model.llama import init_params
from medusa_jax.text.tokenizer import load_tokenizer

THETA = 500000.0
LLAMA3 = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_low_freq_factor": 1.0}
LLAMA3 |= {"rope_high_freq_factor": 4.0, "rope_original_max_position": 8192}
LLAMA3 |= {"rope_theta": THETA}
YARN = {"rope_scaling": "yarn", "rope_theta": 20.0, "rope_low_freq_factor": 1.0}
YARN |= {"rope_high_freq_factor": 32.0, "rope_attention_factor": 0.1 * math.log(4) + 1}
BIASES = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
WIDE = {"rope.dimension_count": 12, "attention.key_length": 12}
WIDER = {"attention.key_length": 16, "attention.value_length": 16}
MULTIPLIED = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5}
MULTIPLIED |= {"logit_divisor": 2.0, "attention_multiplier": 0.25}
SCALES = {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.0}
OLMO2 = {"pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_full": True}
HUNYUAN = {"qk_norm": True, "qk_norm_late": True, "head_dim": 16}
GLM4 = {"post_norm": True, "qkv_bias": True, "head_dim": 16, "rope_dim": 8}
GEMMA = {"activation": "gelu_tanh", "embedding_multiplier": D**0.5, "head_dim": 16}
GEMMA |= {"tie_embeddings": True}
EVERY_FOURTH = (True, True, True, False)
REORDERED = ("llama", "smollm3", "granite", "minicpm")
# family of the file, fields of the configuration, keys of the metadata
CASES = {
    "llama": ("llama", {}, {}),
    "llama_tied": ("llama", {"tie_embeddings": True}, {}),
    "llama_biases": ("llama", BIASES, {}),
    "llama_own_head_size": ("llama", {"head_dim": 12}, WIDE),
    "llama_yarn": (
        "llama",
        YARN | {"rope_factor": 4.0, "rope_original_max_position": 16},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.freq_base": 20.0}
        | {"rope.scaling.original_context_length": 16},
    ),
    "llama_llama3_rope": ("llama", LLAMA3, {"rope.freq_base": THETA}),
    "mistral_window": ("llama", {"sliding_window": 7}, {"attention.sliding_window": 7}),
    "qwen2": ("qwen2", {"qkv_bias": True}, {}),
    "qwen3": (
        "qwen3",
        {"qk_norm": True, "head_dim": 16, "tie_embeddings": True},
        {"attention.key_length": 16, "attention.value_length": 16},
    ),
    "smollm3": (
        "smollm3",
        {"n_layers": 4, "rotated_layers": (True, True, True, False)},
        {"block_count": 4},
    ),
    "granite": ("granite", MULTIPLIED, SCALES | {"attention.scale": 0.25}),
    "minicpm": (
        "minicpm",
        MULTIPLIED | {"attention_multiplier": 0.0, "n_layers": 4},
        SCALES | {"block_count": 4},
    ),
    "phi3": (
        "phi3",
        {"rope_dim": 6, "rope_scaling": "longrope", "rope_short": (1.0, 1.25, 1.5)}
        | {"rope_long": (1.0, 3.0, 8.0), "rope_original_max_position": 256}
        | {"rope_factor": 2.0, "rope_attention_factor": 1.125, "max_position": 256},
        {"rope.dimension_count": 6, "context_length": 512}
        | {"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.125},
    ),
    "olmo2": ("olmo2", OLMO2, {}),
    "olmo3": (
        "olmo2",
        OLMO2 | {"n_layers": 4, "sliding_window": 7, "window_layers": EVERY_FOURTH},
        {"block_count": 4, "attention.sliding_window": 7},
    ),
    "exaone": ("exaone", LLAMA3 | {"tie_embeddings": True}, {"rope.freq_base": THETA}),
    "hunyuan": ("hunyuan-dense", HUNYUAN, WIDER | {"expert_count": 1}),
    "glm4": ("glm4", GLM4, WIDER | {"rope.dimension_count": 8}),
    "gemma": ("gemma", GEMMA, WIDER),
    "gemma3": (
        "gemma3",
        {"n_layers": 6, "sliding_window": 7, "window_layers": (True,) * 5 + (False,)}
        | {"head_dim": 16, "qk_norm": True, "post_norm": True, "activation": "gelu_tanh"}
        | {"rope_window_theta": 10000.0, "embedding_multiplier": D**0.5},
        {"block_count": 6, "attention.sliding_window": 7}
        | {"attention.key_length": 16, "attention.value_length": 16},
    ),
}


# Keys of the metadata, and `rope_scaling` of config.json, as llama.cpp understands them.
SCALED = [
    ({"scaling.type": "linear", "scaling.factor": 2.5}, 2.5),
    ({"scale_linear": 2.0}, 2.0),
    ({"scaling.factor": 4.0, "scale_linear": 2.0}, 4.0),
    ({"scaling.type": "none", "scaling.factor": 4.0, "scale_linear": 2.0}, None),
    ({"scaling.factor": 0.0, "scale_linear": 2.0}, None),
]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "medusa_jax" / "gguf"


def interleaved(array, heads):
    """Rows as llama.cpp orders them: of each head 0, H/2, 1, H/2 + 1, ..."""
    rows = np.arange(len(array)).reshape(heads, 2, -1)
    return array[rows.transpose(0, 2, 1).ravel()]


def save_both(case, folder, tokenizer_json):
    """One random model as a Hugging Face directory and as a GGUF file; (directory, file)."""
    arch, fields, keys = CASES[case]
    metadata = byte_level_metadata(tokenizer_json)
    sizes = {"vocab_size": len(metadata["tokenizer.ggml.tokens"]), "d_model": D, "d_ff": F}
    sizes |= {"n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "head_dim": 8}
    sizes |= {"max_position": 64, "rope_theta": 500.0, "rms_eps": 1e-5}
    config = LlamaConfig(**(sizes | fields))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32),
        jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0)),
    )
    save_backbone(str(folder / "hf"), config, params, "float32")
    arch_id = getattr(gguf.MODEL_ARCH, arch.upper().replace("-", "_"))
    names = gguf.get_tensor_name_map(arch_id, config.n_layers)
    tensors = {}
    for name, tensor in open_checkpoint(str(folder / "hf")).items():
        array = read_whole(tensor)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        if arch in REORDERED and heads:
            array = interleaved(array, heads)
        tensors[names.get_name(name, (".weight", ".bias"))] = array
    assert None not in tensors
    tensors = {
        f"{name}{'' if name.endswith(('.weight', '.bias')) else '.weight'}": array
        for name, array in tensors.items()
    }
    if config.rope_scaling == "llama3":
        tensors["rope_freqs.weight"] = np.float32(llama3_divisors(config))
    for kind in ("short", "long") if config.rope_scaling == "longrope" else ():
        divisors = np.float32(getattr(config, f"rope_{kind}"))
        tensors[f"rope_factors_{kind}.weight"] = divisors
    metadata |= shape_metadata(arch, **keys)
    return str(folder / "hf"), write(folder / "model.gguf", metadata, tensors, arch)


@pytest.mark.parametrize("case", CASES)
def test_every_family_is_the_model_that_was_saved(case, tmp_path, tokenizer_json):
    directory, path = save_both(case, tmp_path, tokenizer_json)
    ours, theirs = BaseFiles.open(make_directory(path)), BaseFiles.open(directory)
    assert ours.config == theirs.config
    assert_same_tensors(ours.tensors, theirs.tensors)


def assert_same_tensors(stored, expected):
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(
            read_whole(stored[name]), read_whole(tensor), err_msg=name
        )


# As llama.cpp has it: a bias is scaled in the MLP only, and an input scale is read and not used.
FACTORS = {
    "attn_q": 0.5,
    "attn_v": 3.0,
    "attn_output": -2.0,
    "ffn_up": 0.25,
    "ffn_down": 4.0,
}


def test_scales_and_single_biases(tmp_path, tokenizer_json):
    """Scales of modules multiply, and biases that a file lacks are zeros."""
    rng = np.random.default_rng(1)
    sizes = {"blk.0.attn_q.bias": D, "blk.1.ffn_up.bias": F}
    biases = {n: rng.normal(size=size).astype(np.float32) for n, size in sizes.items()}
    scales = {f"blk.1.{m}.scale": np.float32([f]) for m, f in FACTORS.items()}
    more = biases | scales | {"blk.0.ffn_up.input_scale": np.float32([7])}
    path = tiny(tmp_path / "a.gguf", tokenizer_json, changes=more)
    plain = open_checkpoint(resolve(tiny(tmp_path / "b.gguf", tokenizer_json)))
    scaled = open_checkpoint(resolve(path))
    assert medusa_jax.load(path, drafter="none").storage.weights in ("stored", "")
    for name, tensor in scaled.items():
        part = name.split(".")
        module = {v: k for k, v in architecture.IN_LAYERS.items()}.get(".".join(part[3:5]))
        stored = f"blk.{part[2]}.{module}.{part[-1]}" if module else name
        expected = biases.get(stored) if part[-1] == "bias" else read_whole(plain[name])
        expected = np.zeros(tensor.shape) if expected is None else expected
        if module == "attn_q" and part[-1] == "bias":
            expected = expected.reshape(HEADS, -1, 2).swapaxes(1, 2).ravel()
        if f"blk.{part[2]}.{module}.scale" in scales and (
            part[-1] == "weight" or "ffn" in module
        ):
            expected = expected * FACTORS[module]
        np.testing.assert_array_equal(read_whole(tensor), expected, err_msg=name)
    assert "model.layers.1.self_attn.o_proj.bias" in scaled


def test_counts_by_layer_and_ids_that_no_token_has(tmp_path, tokenizer_json):
    """Files that llama.cpp loads: equal counts for all layers, ids that it drops."""
    by_layer = {
        "attention.head_count": [HEADS] * LAYERS,
        "feed_forward_length": [F] * LAYERS,
    }
    by_layer |= {"attention.head_count_kv": [KV_HEADS] * LAYERS}
    said = {"ggml.eos_token_id": 2**32 - 1, "ggml.bos_token_id": 4000}
    said |= {"ggml.padding_token_id": 2**32 - 1, "ggml.unknown_token_id": 999}
    path = tiny(tmp_path / "a.gguf", tokenizer_json, by_layer, said)
    plain = tiny(tmp_path / "b.gguf", tokenizer_json)
    assert read_config(resolve(path)) == read_config(resolve(plain))
    ours, expected = load_tokenizer(path), load_tokenizer(plain)
    assert (ours.bos_id, ours.eos_ids) == (expected.bos_id, expected.eos_ids)
    spm = bytes_metadata() | {f"tokenizer.{name}": value for name, value in said.items()}
    tensors = llama_tensors(259)
    file = write(tmp_path / "c.gguf", spm | shape_metadata("llama"), tensors)
    assert (load_tokenizer(file).bos_id, load_tokenizer(file).eos_ids) == (1, {2})


@pytest.mark.parametrize(("keys", "factor"), SCALED)
def test_linear_scaling(keys, factor, tmp_path, tokenizer_json):
    said = {f"rope.{name}": value for name, value in keys.items()}
    config = read_config(resolve(tiny(tmp_path / "a.gguf", tokenizer_json, said)))
    expected = ("linear", factor) if factor else ("none", LlamaConfig.rope_factor)
    assert (config.rope_scaling, config.rope_factor) == expected


@pytest.mark.parametrize("arch", ["gemma3", "olmo2"])
@pytest.mark.parametrize("pattern", [2, [True, False] * 2, [False, True, True, False], 0])
def test_layers_that_have_the_window(arch, pattern, tmp_path):
    """Said by layer, or all but every n-th; 0 is all, as in llama.cpp."""
    said = {"sliding_window": 7, "sliding_window_pattern": pattern}
    said = {"block_count": 4} | {f"attention.{name}": x for name, x in said.items()}
    path = write(tmp_path / "a.gguf", shape_metadata(arch, **said), llama_tensors(9), arch)
    config = parse_config(path, architecture.hf_config(read_gguf(path)))
    layers = [config.has_window(i) for i in range(4)]
    listed = {2: [True, False] * 2, 0: [True] * 4}
    assert layers == (pattern if isinstance(pattern, list) else listed[pattern])


def test_yarn_is_refused_for_phi3(tmp_path):
    """In config.json the name means LongRoPE for this family."""
    said = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    path = write(
        tmp_path / "a.gguf", shape_metadata("phi3", **said), llama_tensors(9), "phi3"
    )
    with refused("rope scaling 'yarn' is not supported here"):
        architecture.hf_config(read_gguf(path))


# llama.cpp needs the value's size as well, and windows are for other architectures there.
@pytest.mark.parametrize(
    "case", sorted(CASES.keys() - {"llama_own_head_size", "mistral_window"})
)
def test_greedy_tokens_are_llama_cpps(case, tmp_path, tokenizer_json):
    llama_cpp = pytest.importorskip("llama_cpp")
    _, path = save_both(case, tmp_path, tokenizer_json)
    ids = list(range(20, 52))
    ours = medusa_jax.load(path, drafter="none")
    [result] = ours.generate([ids], Options(max_new_tokens=24, eos_ids=()))
    theirs = llama_cpp.Llama(path, n_ctx=64, verbose=False)
    greedy = theirs.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0)
    assert list(result.token_ids) == list(itertools.islice(greedy, 24))


def test_what_a_model_says_in_addition_to_its_weights(tmp_path, tokenizer_json):
    """Special ids, the ends of texts and turns, BOS, chat template."""
    said = {f"ggml.{kind}_token_id": i for i, kind in enumerate(("bos", "eos", "eot"))}
    said |= {"ggml.add_bos_token": True, "chat_template": "{{ messages[0]['content'] }}"}
    path = tiny(tmp_path / "a.gguf", tokenizer_json, vocabulary=said)
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_id, tokenizer.prefix) == (0, (0,))
    assert tokenizer.eos_ids == {1, 2, 6}  # <|im_end|> too, as in llama.cpp
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert tokenizer.special_texts["eos_token"] == "<|end_of_text|>"
    assert generation_config(path)["eos_token_id"] == [1, 2, 6]
    said |= {"ggml.padding_token_id": 99}  # a word, which texts still show
    padded = load_tokenizer(tiny(tmp_path / "c.gguf", tokenizer_json, vocabulary=said))
    assert padded.decode([99])
    silent = load_tokenizer(tiny(tmp_path / "b.gguf", tokenizer_json))
    assert (silent.bos_id, silent.eos_ids, silent.chat_template) == (None, {1, 2, 6}, "")


PHI, HARMONY = ["<|end|>", "<|assistant|>"], ["<|return|>", "<|call|>", "<|end|>"]
FIM = ["<|fim_pad|>", "<|file_sep|>", "<|fim_prefix|>", "x"]
DEEPSEEK = ["<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>"]


@pytest.mark.parametrize(
    ("tokens", "ids", "ends"),
    [
        (["<|endoftext|>", "<|im_end|>", "<|im_start|>"], {"eos": 0}, {0, 1}),
        (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], {"eos": 0, "eot": 0}, {0, 1, 2}),
        (["</s>", "<end_of_turn>", "<start_of_turn>", "a"], {"eos": 3}, {0, 1, 3}),
        (PHI, {"eos": 0}, {0}),
        (HARMONY, {"eos": 0}, {0, 1}),
        (["<|calls|>", "<|flush|>", "<|end|>"], {"eos": 0}, {0, 1}),
        (DEEPSEEK, {"eos": 0}, {0}),
        (FIM, {"fim_rep": 3, "eos": 0}, {0, 1, 3}),
        (["none", "of", "them"], {"eom": 2, "eos": 0}, {0, 2}),
    ],
)
def test_what_ends_a_text_ends_it_in_llama_cpp(tokens, ids, ends, tmp_path, tokenizer_json):
    """By name and by text, of any type; the ids are those of llama.cpp 0.3.36's binding."""
    vocabulary = json.loads(tokenizer_json)["model"]["vocab"]
    bytes_ = [token for token in vocabulary if len(token) == 1 and token not in tokens]
    said = {f"ggml.{name}_token_id": i for name, i in ids.items()}
    tokens = [*tokens, *bytes_, "ab"]
    said |= {"ggml.tokens": tokens, "ggml.merges": ["a b"]}
    said["ggml.token_type"] = [4] + [3] * 2 + [1] * (len(tokens) - 3)
    path = tmp_path / "a.gguf"
    metadata = byte_level_metadata(tokenizer_json, **said) | shape_metadata("llama")
    write(path, metadata, llama_tensors(len(tokens)))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.eos_ids == ends
    assert tokenizer.special_ids >= {i for i in ends if tokens[i][0] in "<["}


def test_ids_that_a_sentencepiece_file_does_not_say(tmp_path):
    """llama.cpp's: 1 begins a text, 2 ends it."""
    metadata = bytes_metadata("</x>") | shape_metadata("llama")
    tokenizer = load_tokenizer(write(tmp_path / "a.gguf", metadata, llama_tensors(259)))
    assert (tokenizer.bos_id, tokenizer.prefix, tokenizer.eos_ids) == (1, (1,), {2})


def test_a_file_is_converted_once(tmp_path, tokenizer_json, monkeypatch):
    """By its bytes, read once: a copy elsewhere is the same file, a changed one is another."""
    path = tiny(tmp_path / "a.gguf", tokenizer_json)
    zeros = {"output_norm.weight": np.zeros(D, np.float32)}
    other = tiny(tmp_path / "c.gguf", tokenizer_json, changes=zeros)
    first = make_directory(path)
    assert make_directory(other) != first
    os.rename(path, tmp_path / "b.gguf")
    monkeypatch.setattr(convert, "write_files", None)
    monkeypatch.setattr("medusa_jax.mapped.time.time", lambda: 1e11)  # the files are old
    assert make_directory(str(tmp_path / "b.gguf")) == first != make_directory(other)
    monkeypatch.setattr("hashlib.file_digest", None)
    assert make_directory(str(tmp_path / "b.gguf")) == first


def test_a_split_model_is_found_from_any_part(tmp_path, tokenizer_json, cache):
    """The same weights and tokenizer as one file's, converted and where they are."""
    one = tiny(tmp_path / "one.gguf", tokenizer_json)
    tiny(tmp_path / "m.gguf", tokenizer_json, split=8)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert [part.name for part in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    expected = open_checkpoint(resolve(one))
    # As in the hub's cache, where a link has the name and its target a checksum.
    (tmp_path / "blobs").mkdir()
    for i, part in enumerate(parts):
        part.rename(tmp_path / "blobs" / str(i))
        part.symlink_to(tmp_path / "blobs" / str(i))
    for part in map(str, parts):
        directory = resolve(part)
        assert directory == resolve(str(parts[0])) == make_directory(part)
        assert_same_tensors(open_checkpoint(directory), expected)
        encoded = [load_tokenizer(path).encode("fine, you") for path in (part, one)]
        assert encoded[0] == encoded[1]
    parts[2].rename(tmp_path / "renamed.gguf")
    with refused(r"m-00003-of-00003\.gguf cannot be read: No such file"):
        resolve(str(parts[1]))
    with refused(r"renamed\.gguf is file 3 of 3 of a split model, which"):
        resolve(str(tmp_path / "renamed.gguf"))
    parts[2].symlink_to(tmp_path / "blobs" / "1")
    with refused(r"00003\.gguf is file 2 of 3"):
        resolve(str(parts[0]))


def test_a_name_alone_splits_nothing(tmp_path, tokenizer_json):
    path = tiny(tmp_path / "a-00001-of-00002.gguf", tokenizer_json)
    assert len(open_checkpoint(resolve(path))) == 2 + 9 * LAYERS


def test_processes_that_start_together_convert_once(tmp_path, tokenizer_json, monkeypatch):
    """Threads stand for them: each has a separate lock on the same file."""
    path = tiny(tmp_path / "a.gguf", tokenizer_json)
    made, really = [], convert.write_files

    def counted(*args):
        made.append(args)
        time.sleep(0.2)
        really(*args)

    monkeypatch.setattr(convert, "write_files", counted)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(make_directory, [path] * 4))
    assert (len(found), len(made)) == (1, 1)


def test_values_that_the_type_cannot_hold(tmp_path, tokenizer_json):
    changes = {"output_norm.weight": np.full(D, 1e5, np.float32)}
    path = tiny(tmp_path / "a.gguf", tokenizer_json, changes=changes)
    with refused(r"'output_norm\.weight' in .*a\.gguf has values that float16 cannot hold"):
        medusa_jax.load(path, dtype="float16")


def test_without_the_package(tmp_path, tokenizer_json, monkeypatch):
    path = tiny(tmp_path / "a.gguf", tokenizer_json)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with refused(r"pip install 'medusa-jax\[gguf\]'"):
        make_directory(path)


# One row for each mechanism.
REFUSED = [
    ({"final_logit_softcapping": 30.0}, {}, {}, "logit_softcapping 30.0 is not"),
    (
        {"rope.dimension_sections": [8, 12, 12, 0]},
        {},
        {},
        r"sections \[8, 12, 12, 0\] is not",
    ),
    ({"attention.causal": False}, {}, {}, "causal False is not supported"),
    ({"attention.key_length_swa": 4}, {}, {}, r"_swa 4 is not supported \(only 8\)"),
    ({"block_count": "two"}, {}, {}, "block_count should be int, not 'two'"),
    ({"rope.dimension_count": 4}, {}, {}, "partial_rotary_factor 0.5 is not"),
    ({"rope.scaling.type": "longrope"}, {}, {}, "rope scaling 'longrope' is not supported"),
    ({"rope.scaling.attn_factor": 1.5}, {}, {}, "attn_factor 1.5 is not supported"),
    ({}, {}, {"rope_freqs.weight": [1, 2, 3, 8]}, "rope_freqs.weight are scaled in a way"),
    ({}, {}, {"blk.1.attn_q.weight": None}, "q_proj.weight' of shape .* is missing"),
    ({}, {}, {"token_embd.weight": None}, "it has no tensor 'token_embd.weight'"),
    ({}, {}, {"token_embd.weight": [[1] * D] * 7}, "tokens, but embeddings of 7"),
    ({}, {"eos_token_id": "</s>"}, {}, "eos_token_id should be int, not '</s>'"),
    ({"attention.head_count": [4, 2]}, {}, {}, "head_count should be a number, the same"),
    ({"feed_forward_length": [48] * 3}, {}, {}, "length should be a number, the same for"),
    ({}, {}, {"output.scale": [2]}, "has no place for: 'output.scale'"),
    ({}, {}, {"blk.0.attn_q.scale": [2, 3]}, "has no place for: 'blk.0.attn_q.scale'"),
    ({}, {}, {"blk.0.attn_q.weight": [[0] * D] * 31}, r"has shape \[31, 32\], the config"),
    ({}, {"token_type": [1, 1]}, {}, "the token_type of 2"),
    ({}, {"merges": ["q !x"]}, {}, "its tokenizer does not fit together"),
]


@pytest.mark.parametrize(("shape", "vocabulary", "tensors", "message"), REFUSED)
def test_refused_files_are_named(
    shape, vocabulary, tensors, message, tmp_path, tokenizer_json, cache
):
    path = tmp_path / "a.gguf"
    said = {f"ggml.{key}": value for key, value in vocabulary.items()}
    arrays = {n: None if x is None else np.array(x, np.float32) for n, x in tensors.items()}
    tiny(path, tokenizer_json, shape, said, arrays)
    with refused(message) as error:
        make_directory(str(path))
    assert str(path) in str(error.value)
    assert not [name for name in os.listdir(cache) if not name.endswith(".lock")]


@pytest.mark.parametrize("said", [{"ggml.pre": "mpt"}, {"ggml.model": None}])
def test_a_tokenizer_that_is_named_replaces_the_files(said, tmp_path, tokenizer_json):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json)
    path = tiny(tmp_path / "a.gguf", tokenizer_json, vocabulary=said)
    with refused("is not supported .*; name another with --tokenizer"):
        open_model(path)
    named = open_model(path, str(tmp_path)).tokenizer
    assert named.encode("a b") == load_tokenizer(str(tmp_path)).encode("a b")


def test_arrays_in_arrays_and_types_that_nobody_knows(tmp_path):
    lists = {"a": [[1, 2], [3]], "b": [["x"], ["y", "z"]], "c": [[[0.5]]], "d": 7}
    path = Path(write(tmp_path / "a.gguf", lists, {}))
    assert read_gguf(str(path)).values.items() >= lists.items()
    whole, entry = path.read_bytes(), struct.pack("<Q1sI", 1, b"d", 4)
    path.write_bytes(whole.replace(entry, entry[:-4] + struct.pack("<I", 99)))
    with refused("damaged: the metadata 'd' is of an unknown type, 99"):
        read_gguf(str(path))
    deep = struct.pack("<IQ", 9, 1) * 9999
    path.write_bytes(whole.replace(entry, entry[:-4] + struct.pack("<I", 9) + deep))
    with refused(r"a\.gguf is truncated or damaged: maximum recursion"):
        read_gguf(str(path))


def test_files_that_are_no_model(tmp_path, tokenizer_json):
    with refused(r"nowhere\.gguf cannot be read: No such file"):
        resolve(str(tmp_path / "nowhere.gguf"))
    (tmp_path / "text.gguf").write_text(json.dumps({"a": "long enough for a header"}))
    with refused("is not a little-endian GGUF file of version 2 or 3"):
        resolve(str(tmp_path / "text.gguf"))
    write(tmp_path / "bert.gguf", byte_level_metadata(tokenizer_json), {}, "bert")
    with refused("architecture 'bert' is not supported"):
        resolve(str(tmp_path / "bert.gguf"))
