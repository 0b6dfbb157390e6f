"""Tiny random models, in memory and on disk: the only makers of them."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models

from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.files.fingerprint import fingerprint
from medusa_jax.files.hf_writer import save_backbone
from medusa_jax.files.layouts import native_heads
from medusa_jax.heads.drafter import Drafter
from medusa_jax.heads.registry import make_drafter
from medusa_jax.heads.vocabulary import GROUP
from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.convert import prepare
from medusa_jax.model.llama import Llama, decoding_config, init_params


def tiny_arch(**fields) -> LlamaConfig:
    """Two layers, four query heads on two key/value heads."""
    small = LlamaConfig(23, 16, 2, 4, 2, 6, 20, max_position=512)
    return dataclasses.replace(small, **fields)


def random_like(shapes, seed: int, scale: float = 1.5):
    """Float64 numpy parameters of these shapes, large enough that every part matters.

    Initialisation proper starts with zero biases, unit norms and a small embedding, under
    which mistakes in attention hardly move a logit; and it is a large program to compile.
    """
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        name = path[-1].key
        if name in ("scale", "bias"):
            return (name == "scale") + 0.3 * rng.standard_normal(leaf.shape)
        fan_in = 1 if name == "embedding" else leaf.shape[0]
        return rng.standard_normal(leaf.shape) * scale / np.sqrt(fan_in)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def random_params(config: LlamaConfig, seed: int, scale: float = 1.5):
    """Stored (unfused) parameters of a backbone, see `random_like`."""
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    params = random_like(shapes, seed, scale)
    if "lm_head" in params:
        params["lm_head"]["kernel"][:, 0] *= 1.5  # token 0 is an ordinary, frequent one
    return params


def random_heads(drafter: Drafter, backbone: Backbone, seed: int, scale: float = 1.0):
    """Parameters of draft heads, see `random_like`."""
    shapes = jax.eval_shape(drafter.init, jax.random.key(0), backbone)
    return random_like(shapes, seed, scale)


@partial(jax.jit, static_argnums=(1, 2))
def _prepared(params, config: LlamaConfig, dtype):
    return prepare(params, config, dtype)


def decoder(config: LlamaConfig, params, dtype=jnp.float64):
    """The backbone as the decode loop runs it, and its prepared parameters."""
    llama = Llama(decoding_config(config), dtype, shards=1, kernels=CpuKernels())
    return llama, _prepared(params, config, dtype)


@partial(jax.jit, static_argnums=0)
def _forward_logits(llama, params, tokens_BT):
    def run(module, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        return module.lm_head(module.forward(tokens, positions, jnp.ones_like(tokens)))

    return llama.apply({"params": params}, tokens_BT, method=run)


def forward_logits(config: LlamaConfig, params, text, dtype=jnp.float64) -> np.ndarray:
    """Logits [T, V] of one text by the teacher-forced pass: no cache, no tree, no fusing."""
    padded = -(-len(text) // 64) * 64
    tokens = np.zeros((1, padded), np.int32)
    tokens[0, : len(text)] = text
    return np.asarray(
        _forward_logits(Llama(config, dtype, kernels=CpuKernels()), params, tokens)
    )[0, : len(text)]


@partial(jax.jit, static_argnums=0)
def adapted_logits(config: LlamaConfig, params, adapters=None):
    """Logits [2, 10, V] of two texts of the tokens 0 to 19 by the teacher-forced pass."""
    ids = jnp.arange(20).reshape(2, 10)
    backbone = Backbone(Llama(config), params, adapters)
    positions = jnp.broadcast_to(jnp.arange(10), ids.shape)
    return backbone.lm_head(backbone.forward(ids, positions, jnp.ones_like(ids)))


LETTERS = " abcdefghijklmnopqrstuvwxyz.,\n"
PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
MERGES = [(word[:-1], word[-1]) for word in ("ab", "abc", "th", "the", " a", "in", "er")]
CONTEXT = 96


def write_tokenizer(directory: Path, bos: bool = True, characters: str = LETTERS) -> int:
    """Characters, some merges, <s> and </s>; returns the size of the vocabulary."""
    words = ["<unk>", "<s>", "</s>", *characters, *("".join(pair) for pair in MERGES)]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, MERGES, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "</s>", "unk_token": "<unk>"}
    if bos:
        settings |= {"bos_token": "<s>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(vocab)


def write_model(
    directory: Path, bos: bool = True, seed: int = 0, characters: str = LETTERS, **fields
):
    """Backbone of one layer in `directory`, three untrained Medusa heads in `directory`/heads."""
    size = write_tokenizer(directory, bos, characters)
    sizes = {"vocab_size": size, "max_position": CONTEXT, "n_layers": 1}
    config = tiny_arch(**(sizes | fields))
    params = random_params(config, seed)
    embedding, lm_head = params["embed_tokens"]["embedding"], params.get("lm_head")
    lm_head_VD = lm_head["kernel"].T if lm_head else embedding
    lm_head_VD[:3] *= 0.1  # specials are so rare that texts run to their limit
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    save_backbone(str(directory), config, params, "float32")
    write_heads(directory / "heads", config, params)
    return config, params


def write_heads(directory: Path, config, params, heads=None, ids=(), seed=None):
    """Write draft heads, untrained or random (with a seed). Default: three Medusa heads that share the LM head.

    They score all tokens, or only `ids`.
    """
    backbone = Backbone(Llama(config), params)
    heads = heads or HeadsConfig(n_heads=3, lm_head="shared", draft_vocab=len(ids))
    drafter = make_drafter(heads, config)
    if seed is None:
        head_params = drafter.init(jax.random.key(0), backbone)
    else:
        head_params = jax.tree.map(np.float32, random_heads(drafter, backbone, seed))
    if len(ids):
        head_params[GROUP] = {"ids": np.array(ids, np.int32)}
    record = native_heads.base_record(config, fingerprint(config, params))
    native_heads.save_heads(str(directory), heads, head_params, base=record, recipe={})


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}u{{ m['content'] }}."
    "{% else %}a{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def set_template(directory: Path, template: str) -> None:
    """Give the tokenizer of a directory a chat template."""
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


# Names the speakers with letters that the tokenizer knows, and marks what the assistant writes.
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}u {{ m.content }}\n"
    "{% elif m.role == 'assistant' %}a{% generation %} {{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def write_ending_model(path: Path, **fields) -> None:
    """A chat model that ends most of its answers by itself."""
    config, params = write_chat_model(path, MARKED, **fields)
    params["lm_head"]["kernel"][:, 2] *= 14
    save_backbone(str(path), config, params, "float32")


def write_chat_model(path: Path, template: str = TEMPLATE, **fields):
    """`write_model` with a chat template."""
    made = write_model(path, **fields)
    set_template(path, template)
    return made


FILL = "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|fim_pad|> <|repo_name|> <|file_sep|>"


def write_coder(path: Path, **fields) -> None:
    """`write_model` over printable characters, with Qwen's tokens for filling in the middle; no BOS."""
    names = dict(zip("ÀÁÂÃÄÅ", FILL.split()))
    fields = {"max_position": 1024} | fields
    write_model(path, bos=False, characters=PRINTABLE + "".join(names), **fields)
    file = path / "tokenizer.json"
    data = json.loads(file.read_text())
    vocab = data["model"]["vocab"]
    like = data["added_tokens"][0] | {"special": False}  # as Qwen's files have it
    for character, name in names.items():
        vocab[name] = vocab.pop(character)
        data["added_tokens"].append(like | {"id": vocab[name], "content": name})
    file.write_text(json.dumps(data))
