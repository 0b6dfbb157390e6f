"""Heads in other engines' layouts, read back by what those engines do."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import engines
import numpy as np
import pytest
from cases import thinned
from closeness import assert_close
from head_files import LLAMA, medusa_state, write
from our_heads import (
    BASE,
    EMBEDDED,
    FOLLOWING,
    HIDDEN,
    STREAMS,
    TOKENS,
    exported,
    load,
    our_logits,
    write_base,
    write_heads,
)
from refusals import refused
from safetensors.numpy import load_file, save_file
from shapes import SHAPES, tiny_shape
from tiny import random_params

from medusa_jax.commands.convert import table
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.layouts.convert import convert
from medusa_jax.files.layouts.engines import ENGINES, engines_for, why_not
from medusa_jax.files.layouts.heads_io import open_heads
from medusa_jax.files.layouts.layout import Export
from medusa_jax.heads import vocabulary
from medusa_jax.heads.eagle import EagleConfig
from medusa_jax.heads.names import DRAFTERS
from medusa_jax.heads.registry import drafter_class
from medusa_jax.notation import byte_size

pytestmark = pytest.mark.usefixtures("x64")
TYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture(scope="module")
def facts(base):
    """config.json of the backbone and its LM head [V, D] as stored."""
    return engines.config_of(Path(base.source)), np.float64(base.lm_head().T)


def heads_of(drafter="medusa", **fields):
    return drafter_class(drafter).Config(**({"n_heads": 3, "rank": 5} | fields))


def engines_that_read(target, drafter, path, facts):
    """Logits [K, V] of every engine that should read this layout."""
    config, lm_head = facts
    one = HIDDEN[-1]
    if drafter.startswith("hydra"):
        yield engines.hydra(path, config, HIDDEN, EMBEDDED)
    elif drafter == "eagle":
        engine = "" if target == "eagle" else target
        yield engines.eagle(path, config, HIDDEN, FOLLOWING, lm_head, engine)[:3]
    elif drafter == "eagle3":
        read = engines.eagle3 if target == "eagle3" else engines.speculators
        yield read(path, config, STREAMS, FOLLOWING)[:3]
    elif target == "tgi":
        yield engines.tgi(path, config, 3, one)
        yield engines.vllm(path, config, 3, one, remaps=True)
    else:
        yield engines.vllm(path, config, 3, one, remaps=True)
        yield engines.vllm(path, config, 3, one, remaps=False)


SHARED = {"lm_head": "shared"}
LOW_RANK, FEW = {"lm_head": "low_rank"}, {"draft_vocab": 11}
HYDRA = {"n_layers": 3, "tie_layers": True, "skip": "random", "dropout": 0.0, "rank": 256}
EAGLE = {"drafter": "eagle"} | SHARED
EAGLE3 = {"drafter": "eagle3"}
NEWER = EAGLE3 | {"fc_norm": True, "norm_output": True}
NARROW_BLOCK = {"drafter": "dspark", "tap_layers": "1", "markov_rank": 6, "lm_head": "own"}
NARROW_BLOCK |= {"draft_vocab": 9}
CASES = [
    *(("tgi", {"n_layers": n}, kind) for n, kind in zip((1, 2, 4), TYPES)),
    ("vllm", {"n_layers": 3}, "bfloat16"),
    *((to, SHARED | {"n_layers": 2}, "float32") for to in ("tgi", "vllm")),
    *((to, LOW_RANK, "float32") for to in ("tgi", "vllm")),
    *(("vllm", FEW | more, "float32") for more in ({}, SHARED, LOW_RANK)),
    ("tgi", FEW | SHARED, "float32"),
    *(("hydra", {"drafter": name} | HYDRA, "float32") for name in ("hydra", "hydrapp")),
    *((to, EAGLE, "float16") for to in ("eagle", "sglang")),
    *(
        (to, EAGLE | {"fc_bias": False, "d_ff": 20}, "float32")
        for to in ("eagle", "sglang", "vllm")
    ),
    *((to, EAGLE3 | FEW, "float32") for to in ("eagle3", "speculators")),
    *(
        (to, EAGLE3 | SHARED | more, "float32")
        for to in ("eagle3", "vllm")
        for more in ({}, FEW)
    ),
    *((to, NEWER, "bfloat16") for to in ("eagle3", "speculators")),
    ("eagle3", EAGLE3 | {"norm_before_residual": True, "kv_heads": 4}, "float32"),
]


FIRST = {case[0]: case for case in CASES[::-1]}.values()  # of each layout


@pytest.mark.wide
@pytest.mark.parametrize(("target", "fields", "dtype"), thinned(CASES, *FIRST))
def test_engines_guess_what_we_do(target, fields, dtype, base, facts, tmp_path):
    """The same first guess of each head, and logits as close as the stored type allows; read back, the export
    gives them as well, and in our format the same bits if it holds the same heads."""
    if fields.get("drafter") == "eagle3":  # three layers for it to tap
        layers = {f"layers_{i}": BASE["layers_0"] for i in range(8)}
        deep = dataclasses.replace(LLAMA, n_layers=8)
        base = write_base(tmp_path / "base", deep, BASE | layers)
    stored = write_heads(tmp_path / "heads", base, heads_of(**fields), dtype=dtype)
    heads, params, _ = load(tmp_path / "heads", base.config)
    want, ids = our_logits(heads, params, base.config), slice(None)
    if heads.draft_vocab:
        ids = params[vocabulary.GROUP]["ids"]
    out = exported(stored, base, target, tmp_path / "out")
    again, back, _ = load(out, base.config)
    found = [*engines_that_read(target, heads.drafter, out, facts)]
    for logits in (*found, our_logits(again, back, base.config)[:3]):
        logits = logits if logits.shape == want.shape else logits[:, ids]
        np.testing.assert_array_equal(logits.argmax(-1), want.argmax(-1))
        assert_close(logits, want, dtype="float32")
    assert found
    same = ("lm_head", "fc_bias", "draft_vocab")
    fitted = open_heads(str(out)).fitted(base)
    if all(getattr(fitted.heads, name, 0) == getattr(heads, name, 0) for name in same):
        same_bits(tmp_path / "heads", fitted, base, tmp_path / "back")


def same_bits(folder, stored, base, out):
    """Heads in our format are those of a folder, and belong to the base."""
    back = exported(stored, base, "native", out)
    before, after = (load_file(d / "heads.safetensors") for d in (folder, back))
    assert before.keys() == after.keys()
    for key, x in before.items():
        assert x.dtype == after[key].dtype and x.tobytes() == after[key].tobytes(), key
    meta = json.loads((back / "heads.json").read_text())
    assert meta["base"]["fingerprint"] == base.fingerprint()


@pytest.mark.parametrize(
    ("target", "fields"),
    [("vllm", FEW), ("tgi", {}), ("vllm", EAGLE3 | FEW | {"tap_layers": "0,1"})],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shared_lm_head_is_shared_again(target, fields, dtype, base, tmp_path):
    """If every copy is the model's for the scored tokens, rounded to the file's type."""
    stored = write_heads(
        tmp_path / "heads", base, heads_of(**SHARED, **fields), dtype=dtype
    )
    out = exported(stored, base, target, tmp_path / "out")
    again = open_heads(str(out))
    same_bits(tmp_path / "heads", again, base, tmp_path / "back")
    [file] = out.glob("*.safetensors")
    arrays = load_file(file)
    copy = arrays[again.copied_lm_heads[-1]]
    last_scored = len(copy) if stored.ids is None else stored.ids[-1]
    copy[min(last_scored, len(copy) - 1), -1] += 1
    save_file(arrays, file)
    assert open_heads(str(out)).fitted(base).heads.lm_head == "own"


def test_what_only_speculators_can_say(base, tmp_path):
    """Two layers and other tapped layers, there and back."""
    heads = heads_of("eagle3", n_layers=2, tap_layers="0,1")
    stored = write_heads(tmp_path / "heads", base, heads)
    out = exported(stored, base, "vllm", tmp_path / "out")
    config = engines.config_of(out)
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 2
    again = open_heads(str(out))
    assert (again.heads.n_layers, again.heads.tap_layers) == (2, "0,1")
    same_bits(tmp_path / "heads", again, base, tmp_path / "back")


def test_speculators_names_the_models_own_class(tmp_path):
    """Several families may have one shape."""
    base, file = write_base(tmp_path / "base"), tmp_path / "base" / "config.json"
    said = {"architectures": ["CwmForCausalLM"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    stored = write_heads(tmp_path / "heads", base, heads_of("eagle3", tap_layers="0,1"))
    config = engines.config_of(exported(stored, base, "speculators", tmp_path / "out"))
    verifier = config["speculators_config"]["verifier"]
    assert verifier["architectures"] == said["architectures"]


@pytest.mark.parametrize("target", ["tgi", "native"])
def test_links_that_leave_the_directory_are_not_copied(target, base, tmp_path, capsys):
    """Files of a tokenizer within the directory or the hub's cache are; those of heads are their tree."""
    stored = write_heads(tmp_path / "heads", base, heads_of())
    model, blobs = tmp_path / "hub" / "snapshots" / "1a2b", tmp_path / "hub" / "blobs"
    secret = tmp_path / "secret.json"
    shutil.copytree(base.source, model)
    blobs.mkdir()
    secret.write_text('{"choices": [[0]]}')
    (blobs / "5e").write_text("{}")
    (blobs / "6f").symlink_to(secret)
    kept = {"special_tokens_map.json": blobs / "5e", "vocab.json": model / "config.json"}
    lost = {"generation_config.json": secret, "merges.txt": blobs / "6f"}
    for name, file in (kept | lost | {"vocab.txt": tmp_path / "nowhere"}).items():
        (model / name).symlink_to(file)
    (model / "credentials.json").write_text("{}")
    (tmp_path / "heads" / "tree.json").symlink_to(secret)
    out = exported(stored, BaseFiles.open(str(model)), target, tmp_path / "out")
    written = {file.name for file in out.iterdir()}
    assert written >= (set(kept) if target == "tgi" else set())
    assert not written & {*lost, "vocab.txt", "credentials.json", "tree.json"}
    assert f"is not copied: it is a link to {secret}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "fields", "match"),
    [
        ("tgi", {"drafter": "hydra"}, "--to tgi is for medusa heads, not hydra"),
        ("tgi", {"draft_vocab": 9}, "the 9 tokens of a draft vocabulary.* native, vllm "),
        ("hydra", {"drafter": "hydra", "n_layers": 3}, "tie_layers is false"),
        ("hydra", {"drafter": "hydra"} | SHARED, "separate LM heads with biases"),
        ("eagle", {"drafter": "eagle", "lm_head": "own"}, "these have LM head 'own'"),
        ("vllm", {"drafter": "eagle"} | SHARED, "heads.fc_bias=False"),
        ("eagle3", EAGLE3 | LOW_RANK | {"rank": 5}, "low-rank LM heads"),
        ("vllm", EAGLE3 | {"tap_layers": "1,0"}, r"in order, not \[1, 0\]"),
        ("dflash", {"drafter": "dflash", "tap_layers": "1,0"}, r"in order, not \[1, 0\]"),
        ("sglang", {"drafter": "eagle3", "n_layers": 2}, "one layer, not 2"),
        ("eagle3", {"drafter": "eagle3", "tap_layers": "0,1"}, r"not \(0, 1\), since"),
        (
            "dflash",
            {"drafter": "dspark", "draft_vocab": 9},
            "not the 9 of heads.draft_vocab",
        ),
        (
            "dflash",
            {"drafter": "dflash", "lm_head": "own"},
            "model's LM head, not by 'own'",
        ),
        ("dflash", {"drafter": "dspark", "root_guesses": False}, "root does not guess"),
    ],
)
def test_a_layout_that_cannot_hold_the_heads(target, fields, match):
    reason = why_not(heads_of(**fields), target, LLAMA)
    assert re.search(match, reason) and "\n" not in reason


@pytest.mark.parametrize("target", ["eagle3", "speculators"])
def test_layers_that_the_paper_taps_twice(target):
    """A model of four layers has no three; of an unknown one nothing is said."""
    reasons = [
        why_not(heads_of(**EAGLE3), target, dataclasses.replace(LLAMA, n_layers=n))
        for n in (4, 8)
    ]
    known = "the layout's engine vLLM reads each tapped layer once, in order, not [1, 2, 2]"
    assert reasons == [known, ""]
    assert not why_not(heads_of(**EAGLE3), target)


def test_engines_for_agrees_with_convert(base, tmp_path):
    """Whatever it promises is written, and whatever it refuses is not."""
    for n, fields in enumerate(
        [{}, SHARED, {"draft_vocab": 9}, {"draft_vocab": 9} | SHARED, {"drafter": "hydra"}]
        + [{"drafter": "amphista"}, {"drafter": "eagle", "fc_bias": False} | SHARED]
        + [{"drafter": "eagle"} | SHARED, {"drafter": "eagle3", "draft_vocab": 9}]
        + [{"drafter": "eagle3", "tap_layers": "0,1"}, {"drafter": "hydra"} | SHARED]
        + [{"drafter": "dflash", "tap_layers": "1"}, NARROW_BLOCK]
    ):
        stored = write_heads(tmp_path / f"{n}", base, heads_of(**fields), n)
        able, unable = engines_for(stored.heads, LLAMA)
        assert able["medusa_jax"] == "native"
        for name, engine in ENGINES.items():
            targets = engine.get(stored.heads.drafter, ())
            assert (name in able) + (name in unable) == bool(targets)
            for target in targets:
                out = tmp_path / f"{n}-{name[:3]}-{target}"
                if reason := why_not(stored.heads, target, LLAMA):
                    assert able.get(name) != target
                    with refused(re.escape(reason)):
                        exported(stored, base, target, out)
                else:
                    assert exported(stored, base, target, out).is_dir()
    assert ENGINES["medusa_jax"].keys() == DRAFTERS.keys()


@pytest.mark.parametrize(
    ("changes", "sglang", "vllm"),
    [
        ({"qkv_bias": True}, "Qwen2ForCausalLMEagle", ""),
        ({"qkv_bias": True, "out_bias": True}, "", ""),
        ({"qk_norm": True}, "", ""),
        ({"sliding_window": 5}, "LlamaForCausalLMEagle", "LlamaForCausalLM"),
    ],
)
def test_layers_of_eagle_in_other_engines(changes, sglang, vllm, tmp_path):
    """Each engine has EAGLE-1 for some families of backbones."""
    llama = dataclasses.replace(LLAMA, **changes)
    base = write_base(tmp_path / "base", llama, random_params(llama, 0))
    stored = write_heads(tmp_path / "heads", base, EagleConfig(fc_bias=False))
    for engine, name in {"sglang": sglang, "vllm": vllm}.items():
        if name:
            out = exported(stored, base, engine, tmp_path / engine)
            assert engines.config_of(out)["architectures"] == [name]
        else:
            with refused("EAGLE-1 has"):
                exported(stored, base, engine, tmp_path / engine)


@pytest.mark.parametrize("shape", thinned(SHAPES, "gemma3"))
def test_heads_for_every_shape(shape, tmp_path):
    """Their layers are Llama's, as in published files for such models."""
    llama = tiny_shape(shape)
    base = write_base(tmp_path / "base", llama, random_params(llama, 0))
    for drafter, target in {
        "eagle3": "eagle3",
        "dspark": "speculators",
        "eagle": "eagle",
    }.items():
        fields = SHARED if drafter != "eagle3" else {}
        folder = tmp_path / drafter
        stored = write_heads(folder, base, heads_of(drafter=drafter, **fields))
        out = exported(stored, base, target, tmp_path / f"{drafter}_out")
        same_bits(folder, open_heads(str(out)), base, tmp_path / f"{drafter}_back")


def test_engines_read_embeddings_with_the_models_factor(tmp_path):
    """Those with a copy of their own; others are refused."""
    llama = dataclasses.replace(LLAMA, embedding_multiplier=12.0)
    base = write_base(tmp_path / "base", llama)
    config, lm_head = engines.config_of(tmp_path / "base"), np.float64(base.lm_head().T)
    heads = heads_of(**EAGLE, fc_bias=False)
    stored = write_heads(tmp_path / "heads", base, heads)
    want = our_logits(heads, load(tmp_path / "heads", llama)[1], llama)
    for engine in ("eagle", "vllm"):
        out = exported(stored, base, engine, tmp_path / engine)
        (file,) = [*out.glob("*.bin"), *out.glob("*.safetensors")]
        state = engines.torch_state(file) if file.suffix == ".bin" else load_file(file)
        following = state["embed_tokens.weight"][TOKENS[1:]]
        args = out, config, HIDDEN, following, lm_head, engine.removeprefix("eagle")
        assert_close(engines.eagle(*args)[:3], want, dtype="float32")
        again = open_heads(str(out))
        same_bits(tmp_path / "heads", again, base, tmp_path / f"{engine}_back")
    for target, shared in {"hydra": HYDRA, "sglang": SHARED, "dflash": SHARED}.items():
        drafter = "eagle" if target == "sglang" else target
        heads = heads_of(drafter, **shared)
        assert "without its factor 12" in why_not(heads, target, llama)
        assert not why_not(heads, target, LLAMA)


def test_copies_of_a_lm_head_divide_logits_as_the_model_does(tmp_path):
    llama = dataclasses.replace(LLAMA, logit_divisor=8.0)
    base = write_base(tmp_path / "base", llama)
    stored = write_heads(tmp_path / "heads", base, heads_of(**SHARED))
    want = our_logits(*load(tmp_path / "heads", llama)[:2], llama)
    facts = engines.config_of(tmp_path / "base"), None
    for target in ("tgi", "vllm"):
        out = exported(stored, base, target, tmp_path / target)
        for logits in engines_that_read(target, "medusa", out, facts):
            assert_close(logits, want, dtype="float32")


LOW_HIGH = {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0}
SCALED = [
    {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_max_position": 512},
    {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_max_position": 1024}
    | {"rope_attention_factor": 1.1, "rope_truncate": False},
]


@pytest.mark.parametrize("scaling", SCALED, ids=["llama3", "yarn"])
@pytest.mark.parametrize(
    ("fields", "targets"),
    [
        (EAGLE3 | {"tap_layers": "0,1"}, ["speculators"]),
        ({"drafter": "dflash", "tap_layers": "1"}, ["dflash", "speculators"]),
    ],
    ids=["eagle3", "dflash"],
)
def test_heads_with_a_base_of_their_own_ignore_a_scaling(
    fields, targets, scaling, tmp_path
):
    """They guess as over a model without it, and layouts hold them."""
    llama = dataclasses.replace(LLAMA, **scaling, **LOW_HIGH)
    base = write_base(tmp_path / "base", llama)
    heads = heads_of(**fields, rope_theta=500.0)
    stored = write_heads(tmp_path / "heads", base, heads, norms=1.0)
    _, params, _ = load(tmp_path / "heads", llama)
    logits = our_logits(heads, params, llama)
    np.testing.assert_array_equal(logits, our_logits(heads, params))
    for target in targets:
        again = open_heads(str(exported(stored, base, target, tmp_path / target)))
        assert again.heads.rope_theta == 500
        same_bits(tmp_path / "heads", again, base, tmp_path / f"{target}_back")


def test_the_table_of_engines_is_in_the_page():
    assert table() in (Path(__file__).parents[3] / "docs" / "formats.md").read_text()


def test_heads_of_another_model(base, tmp_path):
    write_heads(tmp_path / "heads", base, heads_of())
    file = tmp_path / "heads" / "heads.json"
    file.write_text(file.read_text().replace(base.fingerprint(), "0123"))
    stored = open_heads(str(tmp_path / "heads"))
    with refused("trained on the model with fingerprint 0123"):
        exported(stored, base, "tgi", tmp_path / "out")
    export = Export(stored, base, "owner/base"), "tgi", str(tmp_path / "out")
    convert(*export, allow_other_base=True)


def test_mixed_types_are_stored_in_one_that_holds_them(base, tmp_path):
    state = medusa_state(2)
    state["0.1.weight"] = state["0.1.weight"].astype(np.float16)
    write(tmp_path / "heads", state, "medusa_lm_head.safetensors")
    stored = open_heads(str(tmp_path / "heads"))
    out = exported(stored, base, "tgi", tmp_path / "out")
    written = load_file(out / "medusa_lm_head.safetensors")
    assert {x.dtype.name for x in written.values()} == {"float32"}
    for key, x in state.items():
        np.testing.assert_array_equal(written[key], x)
    size = (out / "medusa_lm_head.safetensors").stat().st_size
    assert f"- weights: {byte_size(size)} in float32\n" in (out / "README.md").read_text()


def test_the_card_gives_the_measurements(base, tmp_path):
    stored = write_heads(tmp_path / "heads", base, heads_of())
    text = (exported(stored, base, "vllm", tmp_path / "a") / "README.md").read_text()
    assert text.startswith("---\nbase_model: owner/base\n") and "Nothing yet" in text
    assert "- heads: 3" in text and '"num_speculative_tokens": 3' in text
    file = tmp_path / "heads" / "heads.json"
    recipe = {"step": 70, "held_out": {"accepted_length_tree": 2.345}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"recipe": recipe}))
    ladder = [{"nodes": 4, "tokens_per_step": 1.834, "step_latency_ratio": 1.41}]
    ladder += [{"nodes": 6, "tokens_per_step": 1.9}]
    evidence = {"positions": 99, "head_accuracies": [[0.5, 0.1]], "ladder": ladder}
    tree = {"choices": [[0]], "evidence": evidence}
    (tmp_path / "heads" / "tree.json").write_text(json.dumps(tree))
    again = open_heads(str(tmp_path / "heads"))
    text = (exported(again, base, "native", tmp_path / "b") / "README.md").read_text()
    rows = ("| 4 | 1.83 | 1.41x |", "| 6 | 1.90 | not timed |")
    for said in ("at step 70: 2.345 with the best tree", *rows):
        assert said in text
    assert "Nothing yet" not in text and (tmp_path / "b" / "tree.json").exists()
    (tmp_path / "heads" / "tree.json").write_text("[[0]]")
    text = (exported(again, base, "native", tmp_path / "list") / "README.md").read_text()
    assert "at step 70" in text and "- read from: native\n" in text
    block = write_heads(tmp_path / "block", base, heads_of(drafter="dspark"))
    text = (exported(block, base, "dflash", tmp_path / "c") / "README.md").read_text()
    assert '"method": "dspark"' in text and "speculative-algorithm DSPARK" in text
