"""The backbone against transformers, through files: every family and feature that it reads."""

import copy
import itertools
import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from tiny import forward_logits

import medusa_jax
from medusa_jax import Options
from medusa_jax.files import hf
from medusa_jax.files.hf_writer import save_backbone
from medusa_jax.sharding import make_mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

V, T = 96, 40
SMALL = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"max_position_embeddings": 96, "tie_word_embeddings": False}
SMALL |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0}
LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 24}
LINEAR = {"rope_type": "linear", "factor": 2.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
ALPHA = DYNAMIC | {"alpha": 50.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SCALED = {"truncate": False, "mscale": 0.7, "mscale_all_dim": 1.2}
SCALED |= {"beta_fast": 2, "beta_slow": 0.4}
LATE = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
MINISTRAL = {"layer_types": ["full_attention", "sliding_attention"]}
GROWING = {"original_max_position_embeddings": 88, "llama_4_scaling_beta": 0.5}
DEEP = {"num_hidden_layers": 4}
BIASES = {"attention_bias": True, "mlp_bias": True}
MULTIPLIED = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4}
MULTIPLIED |= {"attention_multiplier": 0.5, "logits_scaling": 0.7}
GRANITE4 = {"layer_types": ["attention"] * 2, "num_local_experts": 0}
GRANITE4 |= {"position_embedding_type": "rope", "shared_intermediate_size": 40}
GRANITE4 |= {"mamba_n_heads": 4, "attention_bias": True}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.0, 2.0, 9.0],
}
LONG = {
    "rope_scaling": LONG,
    "original_max_position_embeddings": 24,
    "partial_rotary_factor": 0.75,
}
LONG |= {"max_position_embeddings": 96}
OLMO3 = {"sliding_window": 5, "max_position_embeddings": 128} | DEEP
GEMMA3 = {
    "head_dim": 16,
    "sliding_window": 6,
    "query_pre_attn_scalar": 9,
    "attention_bias": True,
}
GEMMA3 |= {
    "num_hidden_layers": 6,
    "tie_word_embeddings": True,
    "rope_local_base_freq": 50.0,
}
CASES = {
    "llama_mha": ("Llama", {"num_key_value_heads": 4}),
    "llama_gqa": ("Llama", {"head_dim": 12, "rope_theta": 500.0}),
    "llama_linear_rope": ("Llama", {"rope_scaling": LINEAR}),
    "llama_llama3_rope": ("Llama", {"rope_scaling": LLAMA3_ROPE, "rope_theta": 5e5}),
    "llama_yarn": ("Llama", {"rope_scaling": YARN, "rope_theta": 20.0, "head_dim": 16}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biases": ("Llama", BIASES),
    "mistral_window": ("Mistral", {"sliding_window": 7}),
    "mistral_dynamic": ("Mistral", {"rope_scaling": DYNAMIC}),
    "ministral": ("Ministral", MINISTRAL | {"sliding_window": 5, "head_dim": 8}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_scaling": YARN | GROWING}),
    "cwm": ("Cwm", DEEP | {"sliding_window": 5, "head_dim": 8, "bos_token_id": 1}),
    "qwen2_biases": ("Qwen2", {}),
    "qwen2_late_window": ("Qwen2", LATE),
    "qwen3_yarn_scaled": ("Qwen3", {"rope_scaling": YARN | SCALED, "rope_theta": 9.0}),
    "qwen3_qk_norm": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", DEEP | {"tie_word_embeddings": True}),
    "smollm3_listed": ("SmolLM3", {"no_rope_layers": [0, 1], "attention_bias": True}),
    "gemma": ("Gemma", {"head_dim": 16, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "granite": ("Granite", MULTIPLIED | {"rope_theta": 500.0, "mlp_bias": True}),
    "granite4": ("GraniteMoeHybrid", MULTIPLIED | GRANITE4),
    "phi3_longrope": ("Phi3", LONG | {"rope_theta": 50.0}),
    "phi3_short": ("Phi3", LONG | {"original_max_position_embeddings": 90}),
    "phi3_window": ("Phi3", {"sliding_window": 7, "partial_rotary_factor": 0.5}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16, "partial_rotary_factor": 0.25}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16, "rope_scaling": ALPHA}),
    "olmo2": ("Olmo2", {"attention_bias": True, "rope_theta": 300.0}),
    "olmo3": ("Olmo3", OLMO3 | {"rope_scaling": YARN, "rope_theta": 20.0}),
    "olmo3_listed": (
        "Olmo3",
        OLMO3 | {"layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "exaone": ("Exaone", {"rope_scaling": LLAMA3_ROPE}),
    "exaone4": ("Exaone4", {"sliding_window": 5, "rope_scaling": LLAMA3_ROPE} | DEEP),
    "exaone4_full": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "internlm3": ("InternLM3", BIASES | {"head_dim": 8, "rope_scaling": DYNAMIC}),
    "iquestcoder": ("IQuestCoder", BIASES | {"head_dim": 8}),
    "helium": ("Helium", BIASES | {"head_dim": 8, "rope_theta": 300.0}),
    "ernie": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "seed_oss": ("SeedOss", {"head_dim": 16, "attention_out_bias": True}),
    "arcee": ("Arcee", {"rope_scaling": YARN, "mlp_bias": True}),
    "gemma3": ("Gemma3", GEMMA3 | {"rope_scaling": LINEAR, "rope_theta": 700.0}),
}
# Of the shape of another family, which they are saved as.
RENAMED = {"cwm", "granite4", "ernie", "seed_oss"}


def build(case, directory):
    """A random model of the case, saved; logits of standard deviation about 2."""
    family, changes = CASES[case]
    name = "Gemma3Text" if family == "Gemma3" else family
    # transformers writes into the tables that it is given, and cases share some.
    config = getattr(transformers, f"{name}Config")(**copy.deepcopy(SMALL | changes))
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(list(CASES).index(case))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 2:
                # Louder vocabulary matrices: the embedding is also the head where they are tied.
                scale = 2.0 if weight.shape[0] == V else 1.0
                weight.copy_(scale * noise / weight.shape[1] ** 0.5)
            elif name.endswith("bias"):
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(1.0 + 0.2 * noise)
    model.save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def get(case):
        if case not in made:
            directory = str(tmp_path_factory.mktemp(case))
            made[case] = (build(case, directory), directory)
        return made[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_logits_agree(case, models):
    """Of whole texts; `tests/model/test_llama.py` has that passes against the cache give the same."""
    model, directory = models(case)
    config, params = hf.load_backbone(directory, make_mesh())
    config = replace(config, max_position=max(config.max_position, T))  # LongRoPE's choice
    tokens = np.random.default_rng(0).integers(0, V, (2, T))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    assert theirs.std() > 1
    for text, expected in zip(tokens, theirs):
        ours = forward_logits(config, params, text, jnp.float32)
        assert np.abs(ours - expected).max() < 1e-5 * np.abs(expected).max()


TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TOWER |= {"num_attention_heads": 2, "num_key_value_heads": 1, "out_hidden_size": 32}
VISION = {"gemma3": "gemma3", "mistral_window": "mistral3", "ministral3": "mistral3", "exaone4": "exaone4_5"}  # fmt: skip


@pytest.mark.parametrize("case", VISION)
def test_language_models_of_vision_models(case, models, tmp_path, byte_level_dir):
    """With both spellings of keys: transformers still writes the older one for most."""
    (model, directory), auto = models(case), transformers.AutoModelForImageTextToText
    tables = {"text_config": model.config.to_dict(), "vision_config": TOWER}
    tables["tie_word_embeddings"] = model.config.tie_word_embeddings
    config = transformers.AutoConfig.for_model(VISION[case], **tables)
    whole = auto.from_config(config, attn_implementation="eager").eval()
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    prompt, how = [*range(3, 19)], {"max_new_tokens": 24, "do_sample": False}
    expected = whole.generate(torch.tensor([prompt]), **how)[0].tolist()
    (tmp_path / "chat_template.json").write_text('{"chat_template": "T"}')
    shutil.copy(byte_level_dir / "tokenizer.json", tmp_path)
    text = hf.BaseFiles.open(directory)
    for older in (True, False):
        whole.save_pretrained(tmp_path, save_original_format=older)
        ours = medusa_jax.load(str(tmp_path), drafter="none", dtype="float32")
        assert ours.tokenizer.chat_template == "T"
        assert (ours.config, ours.fingerprint) == (text.config, text.fingerprint())
        [result] = ours.generate([prompt], Options(max_new_tokens=24, eos_ids=()))
        assert list(result.token_ids) == expected[len(prompt) :]


ORIGINAL = "original_max_position_embeddings"
# A model, changes of its config.json, and whether they change its text.
EDITED = [
    # A file with both, as some converted ones: transformers adds the one to the other's full attention.
    *((case, {"rope_scaling": LINEAR | {"factor": 8.0}}, True) for case in ("gemma3", "olmo3_listed")),
    *(("mistral_window", {"layer_types": kinds}, kinds is not None)
      for kinds in (None, ["full_attention", "sliding_attention"])),
    ("llama_yarn", {"rope_scaling": YARN | {"factor": None}}, True),
    ("phi3_window", {"layer_types": ["full_attention", "sliding_attention"]}, False),
    ("cwm", {"rope_parameters": "absent", "rope_scaling": LLAMA3_ROPE}, True),
    ("olmo3", {"layer_types": "absent", "sliding_window_pattern": 2}, False),
    *(("phi3_longrope", {"rope_scaling": LONG["rope_scaling"] | {"rope_type": kind, "factor": 9.0, ORIGINAL: 90}, ORIGINAL: outer}, True)
      for kind in ("su", "yarn") for outer in (24, "absent")),
]  # fmt: skip


@pytest.mark.parametrize(("case", "changes", "is_other"), EDITED)
def test_logits_agree_after_a_change(case, changes, is_other, models, tmp_path):
    shutil.copytree(models(case)[1], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: x for k, x in raw.items() if x != "absent"}))
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path, attn_implementation="eager").eval()
    config, params = hf.load_backbone(str(tmp_path), make_mesh())
    config = replace(config, max_position=max(config.max_position, T))
    text = np.random.default_rng(0).integers(0, V, T)
    with torch.no_grad():
        [expected], [unchanged] = (
            one(torch.tensor(text[None])).logits.numpy() for one in (model, models(case)[0])
        )
    ours = forward_logits(config, params, text, jnp.float32)
    most = np.abs(expected).max()
    assert np.abs(ours - expected).max() < 1e-5 * most
    assert (np.abs(unchanged - expected).max() > 0.01 * most) == is_other


@pytest.mark.parametrize("case", CASES)
def test_config_survives_the_way_out_and_back(case, models, tmp_path):
    """Our config.json and weights mean the same to transformers, and to us."""
    model, directory = models(case)
    config, params = hf.load_backbone(directory, make_mesh())
    save_backbone(str(tmp_path), config, params, dtype="float32")
    again, params_again = hf.load_backbone(str(tmp_path), make_mesh())
    assert again == config
    same = jax.tree.map(lambda a, b: bool((a == b).all()), params, params_again)
    assert jax.tree.all(same)
    reread = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).eval()
    assert (type(reread) is type(model)) != (case in RENAMED)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(reread(tokens).logits, model(tokens).logits)


EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
# How else the weights of a tied model are found.
OTHER_KEYS = {
    "copied": lambda state: state | {LM_HEAD: state[EMBEDDING].clone()},
    "untied": lambda state: state | {LM_HEAD: state[EMBEDDING].flip(0).contiguous()},
    "nearly": lambda state: state | {LM_HEAD: state[EMBEDDING] * (1 + 2**-20)},
    "head alone": lambda state: {
        LM_HEAD if k == EMBEDDING else k: x for k, x in state.items()
    },
    "flat": lambda state: {k.removeprefix("model."): x for k, x in state.items()},
}


@pytest.mark.parametrize("kind", OTHER_KEYS)
def test_greedy_text_of_other_keys(kind, models, tmp_path):
    from safetensors.torch import save_file

    model, _ = models("llama_tied")
    state = {name: x.clone() for name, x in model.state_dict().items() if name != LM_HEAD}
    save_file(OTHER_KEYS[kind](state), tmp_path / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours = medusa_jax.load(str(tmp_path), drafter="none", dtype="float32")
    assert ours.config.tie_embeddings == (kind not in ("untied", "nearly"))
    prompt = list(range(3, 19))
    [result] = ours.generate([prompt], Options(max_new_tokens=24, eos_ids=()))
    how = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        whole = theirs.generate(torch.tensor([prompt]), **how)[0].tolist()
    assert list(result.token_ids) == whole[len(prompt) :]


def test_longrope_beyond_its_original_context(tmp_path, byte_level_dir):
    """With the long factors for all texts, as transformers has them for prompts that are longer."""
    theirs, form = build("phi3_longrope", str(tmp_path)), {"dtype": "float32"}
    form["tokenizer"] = str(byte_level_dir)
    with refused("context is from 1 to 96, not 97"):
        medusa_jax.load(str(tmp_path), "none", context=97, **form)
    ours = medusa_jax.load(str(tmp_path), "none", context=96, **form)
    prompts = [[*range(3, 3 + n)] for n in (25, 40)]
    results = ours.generate(prompts, Options(max_new_tokens=50, eos_ids=()))
    how = {"max_new_tokens": 50, "do_sample": False, "pad_token_id": 0}
    for prompt, result in zip(prompts, results):
        with torch.no_grad():
            whole = theirs.generate(torch.tensor([prompt]), **how)[0].tolist()
        assert result.token_ids == whole[len(prompt) :]


NEW = 64
# Each costs some seconds of compiling; the late window has the biases of Qwen2 as well.
LEFT_OUT = {"llama_biases", "qwen2_biases", "phi3_longrope"}


@pytest.mark.parametrize(
    ("case", "ngram", "penalty"),
    [
        *((case, 0, 1.0) for case in sorted(set(CASES) - LEFT_OUT)),
        ("llama_tied", 2, 1.0),
        ("llama_tied", 0, 1.3),
    ],
)
def test_greedy_text_is_the_same(case, ngram, penalty, tmp_path, byte_level_dir):
    """Of the decode loop and `transformers.generate`.

    `ngram`: no_repeat_ngram_size, as the model's own generation_config.json says it; `penalty`: its
    repetition_penalty.
    """
    theirs = build(case, str(tmp_path))
    theirs.generation_config.no_repeat_ngram_size = ngram
    theirs.generation_config.repetition_penalty = penalty
    theirs.generation_config.save_pretrained(str(tmp_path))
    form = {"dtype": "float32", "tokenizer": str(byte_level_dir)}
    ours = medusa_jax.load(str(tmp_path), drafter="none", **form)
    assert ours.no_repeat_ngram_size == ngram
    ours.eos_ids = ()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, V, n).tolist() for n in (5, 16)]
    results = ours.generate(prompts, Options(max_new_tokens=NEW), tree="none")
    for prompt, result in zip(prompts, results):
        with torch.no_grad():
            how = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
            ids, seen = torch.tensor([prompt]), torch.ones(1, len(prompt))
            whole = theirs.generate(ids, attention_mask=seen, **how)[0].tolist()
        new = whole[len(prompt) :]
        if ngram:
            assert len(set(itertools.pairwise(new))) == NEW - 1
        assert len(new) == NEW <= SMALL["max_position_embeddings"] - len(prompt)
        if result.token_ids == new:
            continue
        # Only a tie within rounding excuses a difference; measured there, in float64.
        at = next(i for i in range(NEW) if result.token_ids[i] != new[i])
        with torch.no_grad():
            scores = theirs.double()(torch.tensor([prompt + new[:at]])).logits[0, -1]
        theirs.float()
        gap = abs(float(scores[new[at]] - scores[result.token_ids[at]]))
        assert gap < 64 * np.finfo(np.float32).eps * float(abs(scores).max()), (at, gap)
