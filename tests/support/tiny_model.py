"""A tiny model directory with tokenizer and heads, for tests that start from files."""

import json
from pathlib import Path

import jax
import numpy as np
from planted import random_params, tiny_config
from tokenizers import Tokenizer, decoders, models

from medusa_jax.config import HeadsConfig
from medusa_jax.heads import Backbone, make_drafter
from medusa_jax.heads.vocabulary import GROUP
from medusa_jax.interop import heads_io, hf
from medusa_jax.model.llama import Llama

CHARACTERS = " abcdefghijklmnopqrstuvwxyz.,\n"
MERGES = [
    ("a", "b"),
    ("ab", "c"),
    ("t", "h"),
    ("th", "e"),
    (" ", "a"),
    ("i", "n"),
    ("e", "r"),
]
CONTEXT = 96


def write_tokenizer(directory: Path, bos: bool = True) -> int:
    """Characters, some merges, <s> and </s>; returns the size of the vocabulary."""
    words = ["<unk>", "<s>", "</s>", *CHARACTERS, *("".join(pair) for pair in MERGES)]
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


def write_model(directory: Path, bos: bool = True, seed: int = 0, **fields):
    """Backbone of one layer in `directory`, three untrained Medusa heads in `directory`/heads."""
    size = write_tokenizer(directory, bos)
    sizes = {"vocab_size": size, "max_position": CONTEXT, "n_layers": 1}
    config = tiny_config(**(sizes | fields))
    params = random_params(config, seed)
    tied = config.tie_embeddings
    lm_head_VD = (
        params["embed_tokens"]["embedding"] if tied else params["lm_head"]["kernel"].T
    )
    lm_head_VD[:3] *= 0.1  # specials are so rare that texts run to their limit
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    hf.save_backbone(str(directory), config, params, "float32")
    write_heads(directory / "heads", config, params)
    return config, params


def write_heads(directory: Path, config, params, ids=()):
    """Three untrained Medusa heads that share the LM head, over all tokens or those of `ids`."""
    backbone = Backbone(Llama(config), params)
    heads = HeadsConfig(n_heads=3, lm_head="shared", draft_vocab=len(ids))
    head_params = make_drafter(heads, config).init(jax.random.key(0), backbone)
    if len(ids):
        head_params[GROUP] = {"ids": np.array(ids, np.int32)}
    record = heads_io.describe_base(config, params)
    heads_io.save_heads(str(directory), heads, head_params, base=record, recipe={})
