"""Published heads: found, recognised by their keys, read right or refused with a one-line error."""

import dataclasses
import json
import re

import huggingface_hub
import jax
import numpy as np
import pytest
from closeness import assert_close
from head_files import (
    EAGLE,
    EAGLE3,
    FILES,
    HYDRA,
    IDS,
    LLAMA,
    SPECULATORS,
    V13,
    VERSIONS,
    D,
    V,
    eagle3_logits,
    eagle3_state,
    eagle3_version,
    eagle_logits,
    eagle_state,
    hydra_logits,
    hydra_state,
    medusa_logits,
    medusa_state,
    normal,
    renamed,
    vllm_names,
    write,
)
from our_heads import (
    BASE,
    EMBEDDED,
    FOLLOWING,
    HIDDEN,
    STREAMS,
    TOKENS,
    T,
    load,
    our_logits,
    write_base,
)
from refusals import refused
from safetensors.numpy import load_file, save_file

from medusa_jax.files.families import FAMILIES
from medusa_jax.files.layouts import native_heads
from medusa_jax.files.layouts.heads_io import open_heads
from medusa_jax.files.torch_writer import save_torch

pytestmark = pytest.mark.usefixtures("x64")
SHARED = {"lm_head": "shared"}


def fails(match, path, **options):
    with refused(match):
        load(path, **options)


LM_HEAD = BASE["lm_head"]["kernel"].T
DEPTH = len(TOKENS) - T


def medusa_files():
    """The authors' heads alone, shared LM heads, PEFT's adapter, layers that are one module, vLLM's names."""
    last = HIDDEN[-1]
    for n_layers, name in ((1, "medusa_lm_head.pt"), (2, "medusa_lm_head.safetensors")):
        state, config = medusa_state(5, n_layers), V13 | {"medusa_num_layers": n_layers}
        said = {"n_heads": 5, "n_layers": n_layers, "lm_head": "own"}
        yield state, name, config, said, medusa_logits(state, last)
    # Two layers that torch shares; a file made safe holds the first alone.
    state = dict(state)
    for k in range(5):
        for leaf in ("weight", "bias"):
            state[f"{k}.1.linear.{leaf}"] = state[f"{k}.0.linear.{leaf}"]
    want = medusa_logits(state, last)
    less = {key: x for key, x in state.items() if ".1.linear." not in key}
    yield from ((x, name, config, {"n_layers": 2}, want) for x in (state, less))
    state = medusa_state(3, shared=True)
    want, config = medusa_logits(state, last, LM_HEAD), V13 | {"version": "2"}
    yield state, "medusa_lm_head.safetensors", config, SHARED, want
    prefix = "base_model.model.medusa_head."
    state = medusa_state(2, prefix=prefix)
    want, inner = medusa_logits(state, last, prefix=prefix), "modules_to_save.default."
    named = {re.sub(r"(head\.\d+\.)", rf"\g<1>{inner}", key): x for key, x in state.items()}
    named[f"{prefix}0.original_module.0.linear.weight"] = np.zeros((D, D), np.float32)
    yield from ((x, "adapter_model.bin", None, {}, want) for x in (state, named))
    # vLLM's without biases; then with a draft vocabulary, most frequent token first, and a row of the LM heads
    # for each of its tokens or for all.
    state, config = medusa_state(3), {"num_heads": 3, "num_hidden_layers": 1}
    less = {key: x for key, x in vllm_names(state).items() if "bias" not in key}
    zero = {key: x * ("bias" not in key) for key, x in state.items()}
    yield less, "model.safetensors", config, {}, medusa_logits(zero, last)
    ids, config = np.array([9, 2, 5, 7]), config | {"medusa_fc_bias": True}
    whole = vllm_names(state) | {"token_map": ids}
    few = {key: x[ids] if "lm_head" in key else x for key, x in whole.items()}
    want = medusa_logits(state, last)[:, np.sort(ids)]
    for content in (whole, few):
        yield content, "model.safetensors", config, {"draft_vocab": 4}, want


def hydra_files():
    """Tied layers, LM heads with biases, tables that nothing reads; untied ones; without the copies."""
    for plus, tied in ((False, True), (False, False), (True, True), (True, False)):
        state = hydra_state(plus=plus, tied=tied)
        said = {"drafter": "hydrapp" if plus else "hydra", "n_heads": 3, "n_layers": 3}
        said |= {"tie_layers": tied, "lm_bias": True}
        want = hydra_logits(state, HIDDEN, EMBEDDED, plus=plus)
        yield state, "hydra_lm_head.pt", HYDRA, said, want
        if plus and tied:
            less = {key: x for key, x in state.items() if ".5.linear." not in key}
            yield less, "hydra_lm_head.safetensors", HYDRA, said, want


def eagle_files():
    """One layer for all depths; the copy of the embedding and the rotary table are left. EAGLE-3's layer has
    separate sizes and rotation, over some tokens or all; speculators says its tapped layers."""
    for name, bias in (("pytorch_model.bin", True), ("model.safetensors", False)):
        state = eagle_state(bias)
        said = {"drafter": "eagle", "n_layers": 1, "fc_bias": bias} | SHARED
        for eps in (LLAMA.rms_eps, 0.3):
            want = eagle_logits(state, HIDDEN, FOLLOWING, LM_HEAD, eps=eps)
            yield state, name, EAGLE | {"bias": bias, "rms_norm_eps": eps}, said, want
        few = {
            key: x[:, :12].copy() if "down" in key else x[:12]
            for key, x in state.items()
            if ".mlp." in key
        }
        want = eagle_logits(state | few, HIDDEN, FOLLOWING, LM_HEAD)
        yield (
            state | few,
            name,
            EAGLE | {"intermediate_size": 12},
            said | {"d_ff": 12},
            want,
        )
    for narrow, flags in VERSIONS:
        state, fields = eagle3_version(narrow, flags)
        copied = {"embed_tokens.weight": normal(np.random.default_rng(0), V, D)}
        want = eagle3_logits(state, STREAMS, FOLLOWING, EAGLE3 | flags, DEPTH)
        said = {"drafter": "eagle3", "n_layers": 1, "lm_head": "own"}
        said |= {"draft_vocab": len(IDS) if narrow else 0}
        for config, tensors, taps in (
            (EAGLE3, state, ""),
            (SPECULATORS, renamed(state), "0,0,1"),
        ):
            told = said | {"tap_layers": taps}
            yield tensors | copied, "model.safetensors", config | fields, told, want


# What trainers add to config.json that changes nothing, and how else they name and store tensors.
NEUTRAL = {
    "quantization_config": None, "mask_token_id": None, "eagle_aux_hidden_state_layer_ids": [],
    "parallel_draft_step": 1, "torchscript": False, "id2label": {"0": "LABEL_0"}, "some_new_list": [],
    "num_aux_hidden_states": 3, "next_layer_regular": True, "modal_type": "LLM", "is_causal": True,
    "target_model_type": "qwen2", "decoder_sparse_step": 1, "norm_topk_prob": True, "some_new": "x",
    "embedding_multiplier": 1.0, "_attn_implementation": "sdpa", "routed_scaling_factor": 2.5,
}  # fmt: skip
OPTIMIZER = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True, "use_mtp_layernorm": False, "mask_token_id": None,
    "norm_before_residual": None,
}  # fmt: skip


def by_frequency(state):
    """Model-Optimizer's d2t: the most frequent token first; no t2d."""
    order = np.random.default_rng(1).permutation(len(IDS))
    del state["t2d"]
    state["lm_head.weight"] = np.ascontiguousarray(state["lm_head.weight"][order])
    state["d2t"] = IDS[order] - np.arange(len(IDS))
    return renamed(state)


def other_trainers():
    """EAGLE-3's keys decide, and what says nothing is no reason to refuse: the same drafts."""
    vocabulary = ("d2t", "t2d", "lm_head.weight")
    for change, fields in (
        (lambda s: s, {"num_hidden_layers": 40, "rms_norm_eps": 0.3}),
        *(
            (lambda s, kind=kind: s | {"d2t": s["d2t"].astype(kind)}, {})
            for kind in ("int32", "uint8", "float32", "float16")
        ),
        *(
            (lambda s, stem=stem: {f"{stem}{k}": x for k, x in s.items()}, {})
            for stem in ("draft_model.", "eagle3.", "module.draft.model.")
        ),
        (
            lambda s: {
                k if k in vocabulary else f"eagle_module.{k}": x for k, x in s.items()
            },
            {},
        ),
        (lambda s: {k: x for k, x in s.items() if k != "t2d"}, {"draft_vocab_size": None}),
        (lambda s: {f"_orig_mod.{k}": x for k, x in s.items()}, {}),
        (lambda s: {f"module.model.{k}": x for k, x in renamed(s).items()}, {}),
        (lambda s: {k if k in vocabulary else f"model.{k}": x for k, x in s.items()}, {}),
        (by_frequency, NEUTRAL),
        (by_frequency, {"eagle_config": OPTIMIZER}),
    ):
        said = {"draft_vocab": len(IDS)}
        want = eagle3_logits(eagle3_state(), STREAMS, FOLLOWING, EAGLE3 | fields, DEPTH)
        yield change(eagle3_state()), "model.safetensors", EAGLE3 | fields, said, want


FOUND = [*medusa_files(), *hydra_files(), *eagle_files(), *other_trainers()]


@pytest.mark.parametrize(("state", "name", "config", "said", "want"), FOUND)
def test_heads_are_read_as_their_trainers_wrote_them(
    state, name, config, said, want, tmp_path
):
    folder = write(tmp_path, state, name, config)
    options = {"n_heads": 4} if said.get("drafter") == "eagle" else {}
    heads, params, meta = load(folder, **options)
    assert {field: getattr(heads, field) for field in said} == said
    assert meta == (config or {})
    if heads.drafter == "eagle3" and heads.draft_vocab:
        np.testing.assert_array_equal(params["draft_vocab"]["ids"], IDS)
    assert_close(our_logits(heads, params)[: len(want)], want, 512)


def test_as_many_heads_as_the_file_holds(tmp_path, capfd):
    """Not as its configuration says; and fewer, if asked; by directory or by file."""
    folder = write(tmp_path, medusa_state(5), "medusa_lm_head.pt", V13)
    few, params, _ = load(folder / "medusa_lm_head.pt", n_heads=2)
    assert "holds 5 heads, its config.json says 2" in capfd.readouterr().err
    assert few.n_heads == 2 and set(params) == {"heads_0", "heads_1"}
    state, name, config = FILES["hydra"]
    folder = write(tmp_path / "hydra", state, name, config | {"hydra_num_heads": 7})
    n_heads = load(folder)[0].n_heads
    assert f"holds {n_heads} heads, its config.json says 7" in capfd.readouterr().err


def test_heads_that_were_trained_with_their_backbone(tmp_path):
    """v1.0: both in one directory, a model whose fingerprint the heads know. Adapters of the backbone change it."""
    base = write_base(tmp_path)
    file, state = tmp_path / "model.safetensors", medusa_state(3, prefix="medusa_head.")
    save_file(load_file(file) | state, file)
    heads, params, _ = load(tmp_path)
    want = medusa_logits(state, HIDDEN[-1], prefix="medusa_head.")
    assert_close(our_logits(heads, params), want)
    mark = base.fingerprint()
    assert load(tmp_path, fingerprint=mark)[0] == heads
    message = f"trained on the model with fingerprint {mark}, this one has 01"
    fails(message, tmp_path, fingerprint="01")
    state = medusa_state(2, prefix="base_model.model.medusa_head.")
    state["base_model.model.model.norm.lora_A.weight"] = np.zeros((2, D), np.float32)
    folder = write(tmp_path / "adapter", state, "adapter_model.bin")
    fails("adapters in the same file change it", folder, fingerprint="01")
    assert load(folder)[0].n_heads == 2


@pytest.mark.parametrize("kind", ["exaone", "mistral3"])
def test_full_models_of_families_with_other_modules(kind, tmp_path):
    """EXAONE's `transformer.h`, and a vision model around its language model."""
    base = write_base(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    state, raw = load_file(file), json.loads(config.read_text())
    names = FAMILIES[kind].keys if kind == "exaone" else {}
    for theirs, ours in reversed(names.items()):
        state = {re.sub(rf"\b{ours}\.", f"{theirs}.", key): x for key, x in state.items()}
    if kind == "mistral3":
        raw = {"text_config": raw}
        state = {f"language_model.{key}": x for key, x in state.items()}
        state["vision_tower.ln_pre.weight"] = np.ones(3, np.float32)
    config.write_text(json.dumps(raw | {"model_type": kind}))
    save_file(state | medusa_state(3, prefix="medusa_head."), file)
    assert load(tmp_path, fingerprint=base.fingerprint())[0].n_heads == 3
    fails("trained on the model with fingerprint", tmp_path, fingerprint="01")


def test_what_eagle_3_s_configurations_leave_out(tmp_path):
    """The rotation, which is the default one then; the number of layers of the backbone, told by those that are
    read: entered or left. The model here has one."""
    layers = dict(SPECULATORS["transformer_layer_config"])
    del layers["rope_parameters"]
    config = SPECULATORS | {"transformer_layer_config": layers}
    folder = write(tmp_path, renamed(eagle3_state()), "model.safetensors", config)
    assert load(folder)[0].rope_theta == 10000.0
    for ids in ([2, 16, 29], [1, 15, 28]):
        config = EAGLE3 | {"eagle_config": {TAPPED: ids, "use_aux_hidden_state": True}}
        folder = write(tmp_path, eagle3_state(), "model.safetensors", config)
        fails("were made with n_layers 32, the model has 1", folder)


# Refusals, one row for each mechanism. Keys and shapes that all layouts check are in test_heads_io.py.

TAPPED = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("kind", "match", "fields", "tensors"),
    [
        *(("vllm", "token_map is not a", {}, {"token_map": np.array(x, int)}) for x in ([1, 1], [2, -1])),
        ("medusa", "holds 1 layers, its .* says 2", {"medusa_num_layers": 2}, {}),
        # Fewer rows than the draft vocabulary, or than its last token needs; more than it has.
        *(("vllm", rf"'lm_heads.0.weight' in .* has shape \[{n}, {D}\], .* asks for \[3, {D}\]", {},
           {"token_map": np.array([7, 1, 3]), "lm_heads.0.weight": np.ones((n, D), np.float32)}) for n in (2, 5)),
        ("eagle3", rf"'lm_head.weight' in .* has shape \[12, {D}\], .* asks for \[11, {D}\]", {},
         {"t2d": None, "d2t": IDS[::-1] - np.arange(11), "lm_head.weight": np.ones((12, D), np.float32)}),
        ("hydra", "hidden_state_offset 1 is not supported", {"hidden_state_offset": 1}, {}),
        ("hydra", "holds 3 layers, its .* says 4", {"hydra_num_layers": 4}, {}),
        *((kind, "num_layers should be int, not '1'", {f"{kind}_num_layers": "1"}, {}) for kind in ("medusa", "hydra")),
        ("eagle", "rope_theta 5000.0, the model has 10000.0", {"rope_theta": 5000}, {}),
        ("eagle3", r"mrope_section \[1\] is not supported", {"mrope_section": [1]}, {}),
        ("eagle3", "residual_scale 2 is not", {"eagle_config": {"residual_scale": 2}}, {}),
        ("eagle3", "num_aux_hidden_states 4 is not", {"num_aux_hidden_states": 4}, {}),
        ("eagle3", "is_causal False is not supported", {"is_causal": False}, {}),
        ("eagle3", "should be whole numbers.*not float32.11. with 0.5", {}, {"d2t": np.full(11, 0.5, np.float32)}),
        ("eagle3", "not float16.11. with 4096", {}, {"d2t": np.full(11, 4096, np.float16)}),
        ("eagle3", "parallel_draft_step 2 is not supported", {"parallel_draft_step": 2}, {}),
        ("eagle3", "draft_vocab_size 12, .* has 11 tokens", {"draft_vocab_size": 12}, {}),
        ("eagle3", "fc_norm should be bool, not 1", {"fc_norm": 1}, {}),
        ("eagle3", r"\[3, 9, 20\] are not the layers of", {TAPPED: [3, 9, 20]}, {}),
        ("eagle3", "'sliding_attention'", {"layer_types": ["sliding_attention"]}, {}),
        *((kind, rf"a window \(sliding_window {x or 4096}\) are", {"model_type": "mistral", "sliding_window": x or ...}, {})
          for kind in ("eagle", "eagle3") for x in (8, 0)),
        ("eagle3", "layers of qwen3 are not supported", {"model_type": "qwen3"}, {}),
        *((kind, "unlike Llama's", {"model_type": name}, {}) for kind in ("eagle", "eagle3") for name in ("granite", "olmo2")),
        ("eagle3", "'d2t' is missing", {}, {"d2t": None}),
        ("eagle3", "name different tokens", {}, {"t2d": ~eagle3_state()["t2d"]}),
        ("eagle3", "some twice", {}, {"t2d": None, "d2t": -np.arange(len(IDS))}),
        ("speculators", "does not say norm_before_residual", {"norm_before_residual": ...}, {}),
        ("speculators", "only eagle3 is supported for these weights, not .x", {"speculators_model_type": "x"}, {}),
        ("speculators", "mask_token_id 1 is not supported", {"mask_token_id": 1}, {}),
        ("speculators", "embed_requires_grad True is not supported", {"embed_requires_grad": True}, {}),
        ("speculators", "numbers from 0 to 1", {TAPPED: [0, 1, 9]}, {}),
    ],
)  # fmt: skip
def test_files_that_are_not_supported(kind, match, fields, tensors, tmp_path):
    state, name, config = FILES[kind]
    config = {k: x for k, x in (config | fields).items() if x is not ...}
    state = {k: x for k, x in (state | tensors).items() if x is not None}
    fails(match, write(tmp_path, state, name, config))


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "speculators", "hydra"])
def test_an_embedding_of_their_own_is_refused(kind, tmp_path):
    """A copy may be rounded, as 4 bits do; it is multiplied by the model's factor."""
    llama = dataclasses.replace(LLAMA, embedding_multiplier=12.0)
    base = write_base(tmp_path / "base", llama)
    state, name, config = FILES[kind]
    key = "input_embed_fn.weight" if kind == "hydra" else "embed_tokens.weight"
    own = np.float32(base.array("embed_tokens/embedding"))
    noise = 0.1 * own.std() * np.random.default_rng(0).standard_normal((V, D), np.float32)
    for i, copy in enumerate(
        (12 * own, 12 * (own + noise), own, np.ones_like(own), own[1:])
    ):
        path = write(tmp_path / str(i), state | {key: copy}, name, config)
        stored = open_heads(str(path))
        if i < 2:
            assert stored.fitted(base).heads.drafter == stored.heads.drafter
        else:
            with refused(f"key '{key}' in .* is not the model's embedding times 12: heads"):
                stored.fitted(base)


def test_no_head_of_an_adapter_is_lost(tmp_path):
    """A name that belongs neither to heads nor to the backbone."""
    prefix = "base_model.model.medusa_head."
    state = medusa_state(2, prefix=prefix)
    state = {re.sub(r"head(\.\d\.1)", r"hexd\1", key): x for key, x in state.items()}
    fails(
        "no place for: .*medusa_hexd",
        write(tmp_path, state, "adapter_model.safetensors", None),
    )


# Where heads are looked for.


def test_safetensors_are_preferred(tmp_path):
    write(tmp_path, medusa_state(2), "medusa_lm_head.safetensors", V13)
    save_torch(str(tmp_path / "medusa_lm_head.pt"), medusa_state(3))
    assert open_heads(str(tmp_path)).heads.n_heads == 2
    assert open_heads(str(tmp_path / "medusa_lm_head.pt")).heads.n_heads == 3


def test_from_the_hub_only_what_is_needed(tmp_path, monkeypatch):
    """The safetensors alone where there are any, else the .pt, else a whole model."""
    asked = []

    def snapshot(repo, revision, allow_patterns, ignore_patterns):
        if ignore_patterns:  # else of folders
            asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    write(tmp_path, medusa_state(2), "medusa_lm_head.safetensors", V13)
    assert open_heads("owner/heads").heads.n_heads == 2
    assert len(asked) == 2 and not any(".pt" in p for patterns in asked for p in patterns)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    write(tmp_path, medusa_state(3), "medusa_lm_head.pt", V13)
    assert open_heads("owner/heads").heads.n_heads == 3
    assert "medusa_lm_head.pt" in asked[-1] and "*.safetensors" not in asked[-1]
    # A whole model, whose .bin is asked for where nothing else came.
    (tmp_path / "medusa_lm_head.pt").unlink()
    for name, tried in (
        ("pytorch_model.bin", ["*.safetensors", "pytorch_model*.bin"]),
        ("model.safetensors", ["medusa_lm_head.pt", "*.safetensors"]),
    ):
        write(tmp_path, eagle_state(), name, EAGLE)
        assert open_heads("owner/heads").heads.drafter == "eagle"
        assert all(a in patterns for a, patterns in zip(tried, asked[-2:], strict=True))


def test_other_things_are_no_heads(tmp_path):
    model = tmp_path / "model"
    write(model, {"model.norm.weight": normal(np.random.default_rng(0), D)},
          "model.safetensors", {"model_type": "llama"})  # fmt: skip
    fails("holds a model, not draft heads: give it to --model", model)
    training = tmp_path / "training"
    training.mkdir()
    (training / "config.json").write_text('{"model": {}, "workdir": ""}')
    fails("training holds no draft heads", training)
    for above, heads in (
        (model, model / "heads"),
        (training, training / "export"),
        (tmp_path / "own", tmp_path / "own/run/export"),
        (tmp_path / "tuned", tmp_path / "tuned/export/heads"),
    ):
        heads.mkdir(parents=True)
        (heads / "heads.json").write_text("{}")
        fails(f"draft heads in a directory below: give --drafter {heads}", above)
    (tmp_path / "empty").mkdir()
    strange = {f"{name}.weight": np.ones(2, np.float32) for name in "abcd"}
    write(tmp_path / "strange", strange, "model.safetensors", {"model_type": "llama"})
    fails("keys of no known draft heads, such as 'a.weight', 'b", tmp_path / "strange")
    fails("holds no draft heads: --drafter takes heads that train.py", tmp_path / "empty")


def test_our_own_by_directory_and_by_file(tmp_path):
    heads, params, _ = load(write(tmp_path, medusa_state(2), "medusa_lm_head.pt", V13))
    base = {"d_model": D, "vocab_size": V, "fingerprint": "x"}
    native_heads.save_heads(str(tmp_path / "own"), heads, params, base=base, recipe={})
    for file in ("", "heads.json", "heads.safetensors"):
        again, loaded, _ = load(tmp_path / "own" / file)
        assert again == heads
        jax.tree.map(np.testing.assert_array_equal, loaded, params)
