"""Small GGUF files, written by the `gguf` package, and texts that are hard to split."""

import json

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

D, F, HEADS, KV_HEADS, LAYERS = 32, 48, 4, 2, 2

CHUNKS = [
    "The quick brown fox", "don't you'll WE'VE", "naïve café", "Straße", "Быстрая лиса", "γλώσσα μου",
    "اللغة العربية", "हिन्दी भाषा", "快速的棕色狐狸", "日本語のテキスト", "한국어", "def f(x):\n    return x**2\n",
    "for (int i=0;i<10;++i) {", "</div>\n", "a\tb\t\tc", "🙂", "👩‍👩‍👧‍👦", "🇫🇷", "½ Ⅷ ٣", "...!?", "--flag=value",
    "https://example.org/a?b=1", "e\u0301",
]  # fmt: skip
BLANKS = ["", " ", "  ", "     ", "\n", "\n\n", " \n ", "\t", "\u00a0"]


def strings(count, special=()):
    """Words of six scripts, code, numbers, emoji and `special` texts, with blanks between them."""
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(rng.integers(1, 9)):
            digits = str(rng.integers(0, 10 ** rng.integers(1, 9)))
            parts += [rng.choice([*CHUNKS, *special, digits, digits]), rng.choice(BLANKS)]
        texts.append("".join(parts))
    return texts


def write(path, metadata, tensors, arch="llama", split=0):
    """A GGUF file; a tensor is an array of float32, or (array, block type to store it in).

    With `split` it is several, of so many tensors each, named as llama.cpp does.
    """
    writer = gguf.GGUFWriter(str(path), arch, split_max_tensors=split)
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        add[type(value)](key, value)
    for name, tensor in tensors.items():
        array, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        if kind is not None and array.dtype != np.uint8:
            array = gguf.quantize(array, kind)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


# Where blocks of a type have float16 scales and minima.
SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(kind, outputs, inputs, rng):
    """Rows of blocks of random bytes, the first with the largest codes, the second with -128 where bytes are codes.
    Scales have any size and sign: zeros, and far below 1, too."""
    per_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    shape = outputs, inputs // per_block
    blocks = rng.integers(0, 256, (*shape, size), np.uint8)
    blocks[:1], blocks[1:2] = 255, 128
    for at in SCALES.get(kind, (0,)):
        halves = rng.integers(0, 2**16, shape).astype(np.uint16)
        halves[halves & 0x7C00 == 0x7C00] &= 0x83FF  # no infinity: as small as float16 is
        usual = (rng.standard_normal(shape) / 100).astype(np.float16).view(np.uint16)
        halves = np.where(rng.random(shape) < 0.5, halves, usual)
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def shape_metadata(arch, **changes):
    """What a file of the test's sizes says of its shape; `None` takes a key out."""
    keys = {"block_count": LAYERS, "embedding_length": D, "feed_forward_length": F}
    keys |= {"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS}
    keys |= {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500.0}
    keys |= {"context_length": 64, **changes}
    return {f"{arch}.{key}": value for key, value in keys.items() if value is not None}


def byte_level_metadata(tokenizer_json, pre="gpt-2", **changes):
    """The vocabulary of a tokenizer.json as a GGUF file has it, its special tokens as such."""
    raw = json.loads(tokenizer_json)
    vocab = raw["model"]["vocab"]
    special = {token["content"] for token in raw["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    keys = {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": [3 if token in special else 1 for token in tokens],
        "ggml.merges": [" ".join(merge) for merge in raw["model"]["merges"]],
        **changes,
    }
    return {f"tokenizer.{key}": value for key, value in keys.items() if value is not None}


def sentencepiece_metadata(tokens, kinds=None, scores=None, **changes):
    """A vocabulary of sentencepiece, of usual tokens without scores if nothing else is said."""
    keys = {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds or [1] * len(tokens),
        "scores": scores or [0.0] * len(tokens),
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def bytes_metadata(end="</s>"):
    """A vocabulary of bytes: token 3 + b is byte b, after <unk>, <s> and the end of a text."""
    tokens = ["<unk>", "<s>", end, *(f"<0x{i:02X}>" for i in range(256))]
    return sentencepiece_metadata(tokens, [2, 3, 3, *[6] * 256])


def llama_shapes(vocab_size, D=D, F=F):
    """Shapes of the tensors of a tied llama model, by their GGUF names."""
    K = D // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (vocab_size, D), "output_norm.weight": (D,)}
    of_layer = {"attn_norm": (D,), "attn_q": (D, D), "attn_k": (K, D), "attn_v": (K, D)}
    of_layer |= {"attn_output": (D, D), "ffn_norm": (D,), "ffn_gate": (F, D)}
    of_layer |= {"ffn_up": (F, D), "ffn_down": (D, F)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def llama_tensors(vocab_size):
    """Random tensors of a tied llama model of the test's sizes, by their GGUF names."""
    rng = np.random.default_rng(0)
    shapes = llama_shapes(vocab_size)
    return {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}


def tiny(path, tokenizer_json, shape=(), vocabulary=(), changes=(), split=0, more=()):
    """A tied llama file of this tokenizer; `changes` replace tensors, None takes one out."""
    metadata = byte_level_metadata(tokenizer_json, **dict(vocabulary)) | dict(more)
    tensors = llama_tensors(len(metadata["tokenizer.ggml.tokens"])) | dict(changes)
    tensors = {name: array for name, array in tensors.items() if array is not None}
    return write(
        path, metadata | shape_metadata("llama", **dict(shape)), tensors, split=split
    )
