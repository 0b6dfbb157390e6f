"""Every loader on spoilt files: loaded as it was, or refused in one sentence; never anything else.

A mutation flips bits, cuts the end off, removes, doubles, overwrites or inserts a stretch, writes
an absurd size, nests deeply or changes a value of a JSON file. What must not happen: another
exception, a crash, more than 5 seconds, a sentence of two lines, tensors of other names, shapes
or types than were written, a weights file that loads though its end is gone.
"""

import contextlib
import faulthandler
import json
import random
import resource
import shutil
import struct
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cases import wide
from flax.traverse_util import unflatten_dict
from gguf_files import tiny
from head_files import FILES, LLAMA, medusa_state, write
from our_heads import write_base

from medusa_jax.errors import UserError
from medusa_jax.files import hf, hf_writer
from medusa_jax.files.gguf.convert import write_files
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.layouts import native_heads
from medusa_jax.files.layouts.heads_io import open_heads
from medusa_jax.files.source import flatten
from medusa_jax.sharding import make_mesh
from medusa_jax.text.chat import encode_prompt, shipped_template
from medusa_jax.text.tokenizer import load_tokenizer
from medusa_jax.tree.files import TreeFile

SECONDS = 5
GROWTH = 500 << 20


@dataclass
class Target:
    """A file to spoil, and what reads it.

    Attributes:
      same: what a load gives must be what it gave before the file was spoilt.
      weights: the file is one of tensors: shorter than it was it must not load.
      end: without its end the file must not load.
    """

    file: Path
    load: object
    same: bool = True
    weights: bool = False
    end: bool = False
    good: bytes = b""
    before: object = None


# Readers of a path; what they return must be the same of a file that loads although it is spoilt.


def read_heads(path):
    """Names, shapes and types of all parameters once they have been read."""
    stored = open_heads(str(path))
    arrays = stored.read(LLAMA)
    return stored.heads, {name: (x.shape, x.dtype.name) for name, x in arrays.items()}


def read_model(path):
    config, params = hf.load_backbone(str(path), make_mesh())
    return config, {n: x.shape for n, x in flatten(params).items()}


def read_base(path):
    base = BaseFiles.open(str(path))
    return base.lm_head().shape, base.fingerprint()


def read_tokenizer(path):
    tokenizer = load_tokenizer(str(path))
    return tokenizer.decode(tokenizer.encode("the cab, in a bath"))


def read_template(path):
    return encode_prompt(load_tokenizer(str(path)), "the cab")


def read_gguf_file(path):
    """A letter of a name may change unnoticed, so what it holds is not compared."""
    write_files(str(path), str(path.parent / "gguf"))
    return True


def read_tree(path):
    return TreeFile.read(path).tree.n_nodes


@pytest.fixture(scope="module")
def targets(tmp_path_factory, sentencepiece_dir, tokenizer_json):
    """Small files of every kind that is read, each with its reader."""
    root = tmp_path_factory.mktemp("fuzz")
    made = {}

    def add(name, file, read, path, **options):
        made[name] = Target(Path(file), partial(read, path), **options)

    def add_heads(name, state, file, config, same=True):
        folder = write(root / name, state, file, config)
        add(name, folder / file, read_heads, folder, weights=True)
        add(f"{name}-config", folder / "config.json", read_heads, folder, same=same)

    same = ("vllm", "medusa", "hydra")  # others have numbers of their own in config.json
    for kind, (state, file, config) in FILES.items():
        add_heads(kind, state, file, config, kind in same)
    add_heads("safe", medusa_state(2), "medusa_lm_head.safetensors", {})
    stored = open_heads(str(root / "medusa"))
    own, record = root / "own", {"d_model": 16, "vocab_size": 23, "fingerprint": "x"}
    tree = unflatten_dict(stored.read(LLAMA), sep="/")
    native_heads.save_heads(str(own), stored.heads, tree, base=record, recipe={"steps": 1})
    add("own", own / "heads.safetensors", read_heads, own, weights=True)
    add("own-json", own / "heads.json", read_heads, own, same=False)

    base = root / "base"
    write_base(base)
    add("model", base / "model.safetensors", read_model, base, weights=True)
    add("config", base / "config.json", read_base, base, same=False)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        add(name, base / name, read_tokenizer, base, same=False)
    (base / "chat_template.jinja").write_text(shipped_template("llama2"))
    add("template", base / "chat_template.jinja", read_template, base, same=False)
    pieces = root / "sentencepiece"
    shutil.copytree(sentencepiece_dir, pieces)
    add("tokenizer.model", pieces / "tokenizer.model", read_tokenizer, pieces, same=False,
        end=True)  # fmt: skip
    state = medusa_state(1, prefix="base_model.model.medusa_head.")
    state["base_model.model.model.layers.0.mlp.lora_A.weight"] = np.ones(2, np.float32)
    adapter = write(root / "adapter", state, "adapter_model.safetensors")
    file = adapter / "adapter_model.safetensors"
    add("adapter", file, read_heads, adapter, weights=True)

    sharded = root / "sharded"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_writer, "SHARD_BYTES", 4000)
        write_base(sharded)
    add("index", sharded / hf_writer.INDEX_FILE, read_model, sharded, same=False)

    file = tiny(root / "a.gguf", tokenizer_json)
    (root / "gguf").mkdir()
    add("gguf", file, read_gguf_file, Path(file), same=False, end=True)

    file = root / "tree.json"
    file.write_text(json.dumps({"choices": [[0], [1], [0, 0]], "nodes": 4}))
    add("tree", file, read_tree, file, same=False)

    for name, target in made.items():
        target.good = target.file.read_bytes()
        target.before = target.load()
        assert target.before, name
    return made


# Mutations: (random numbers, bytes) -> bytes.


def flip(rng, data):
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def flip_early(rng, data):
    """Headers are small and come first, or last in a zip archive."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(out), 900))
        out[at if rng.random() < 0.5 else -1 - at] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(rng, data):
    return data[: rng.randrange(len(data))]


def restretch(rng, data):
    """A stretch is removed, doubled or overwritten."""
    a = rng.randrange(len(data))
    b = min(len(data), a + 2 ** rng.randrange(12))
    fill = rng.choice([b"\0", b"\xff", bytes([rng.randrange(256)])]) * (b - a)
    return data[:a] + rng.choice([b"", 2 * data[a:b], fill]) + data[b:]


def insert(rng, data):
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(2 ** rng.randrange(8)) + data[at:]


def absurd_size(rng, data):
    """A size field somewhere, most often at the start or the end, becomes enormous."""
    value = rng.choice([2**63, 2**64 - 1, 2**32 - 1, 2**31, 10**12, len(data), 0])
    at = rng.choice([0, rng.randrange(len(data)), max(0, len(data) - rng.randrange(1, 60))])
    return data[:at] + struct.pack("<Q", value) + data[at + 8 :]


def nest(rng, data):
    depth = rng.choice([100, 5_000, 60_000])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
    inside = f"{opening * depth}1{closing * depth}".encode()
    if data[8:9] == b"{":  # the header of safetensors
        return struct.pack("<Q", len(inside)) + inside + data
    at = rng.choice([0, data.find(b":") + 1])
    return data[:at] + inside + data[at:]


ODD = [None, True, -1, 0, 1, 2**31, 10**30, 1e308, -0.5, "", "x", "9" * 30]
ODD += [[], {}, [[]], [None]]


def change_value(rng, data):
    """Another value at a random place of a JSON file, sometimes one key less."""
    try:
        tree = json.loads(data)
    except ValueError:
        return flip(rng, data)
    inner = tree
    while True:
        places = list(inner) if isinstance(inner, dict) else range(len(inner))
        if not places:
            return json.dumps(ODD[rng.randrange(len(ODD))]).encode()
        at = rng.choice(list(places))
        deeper = inner[at]
        if isinstance(deeper, (dict, list)) and deeper and rng.random() < 0.8:
            inner = deeper
            continue
        if rng.random() < 0.2:
            del inner[at]
        else:
            inner[at] = rng.choice(ODD)
        return json.dumps(tree).encode()


MUTATIONS = [flip, flip_early, cut, *[restretch] * 3, insert, absurd_size, nest]


def write_anew(file, data):
    """Into a new file: one that is written over goes to the disk at once (ext4), and one waits."""
    file.unlink()
    file.write_bytes(data)


def fuzz(targets, count, seed):
    """Spoil the files in turn; returns how many mutations were refused."""
    rng, refused = random.Random(seed), 0
    faulthandler.dump_traceback_later(600, exit=False)
    names = sorted(targets)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for n in range(count):
        name = names[n % len(names)]
        target = targets[name]
        is_json = target.file.suffix == ".json"
        mutate = change_value if is_json and rng.random() < 0.5 else rng.choice(MUTATIONS)
        spoilt = mutate(rng, target.good)
        write_anew(target.file, spoilt)
        what = f"{name}, {mutate.__name__}, mutation {n} of seed {seed}"
        started = time.monotonic()
        try:
            found = target.load()
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 1000, f"{what}: {error}"
        except BaseException as error:
            raise AssertionError(f"{what}: {error!r}") from error
        else:
            assert not target.same or found == target.before, f"{what} loads as {found}"
            shorter = target.weights and len(spoilt) < len(target.good)
            assert not shorter, f"{what} loads though bytes are gone"
            assert not (target.end and mutate is cut), f"{what} loads without its end"
        seconds = time.monotonic() - started
        assert seconds < SECONDS, f"{what} took {seconds:.1f} s"
        write_anew(target.file, target.good)
    faulthandler.cancel_dump_traceback_later()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown << 10 < GROWTH, f"{grown >> 10} MiB more at the peak"
    return refused


@pytest.mark.parametrize("n", [500, *wide(2_000)])
def test_spoilt_files_are_refused_in_a_sentence(targets, n):
    assert fuzz(targets, n, 0) > n / 2


@pytest.mark.slow
def test_a_hundred_thousand_spoilt_files(targets):
    assert sum(fuzz(targets, 10_000, seed) for seed in range(1, 11)) > 50_000


def leaves(tree, path=()):
    """The places of all numbers of a JSON value."""
    if isinstance(tree, (dict, list)):
        for at in tree if isinstance(tree, dict) else range(len(tree)):
            yield from leaves(tree[at], (*path, at))
    elif type(tree) in (int, float):
        yield path


def test_numbers_beyond_floats(targets):
    """Every number of every JSON file in turn; JSON has no largest one."""
    for target in targets.values():
        places = leaves(json.loads(target.good)) if target.file.suffix == ".json" else ()
        for *above, last in places:
            tree = inner = json.loads(target.good)
            for at in above:
                inner = inner[at]
            inner[last] = 10**309
            write_anew(target.file, json.dumps(tree).encode())
            with contextlib.suppress(UserError):
                target.load()
        write_anew(target.file, target.good)
