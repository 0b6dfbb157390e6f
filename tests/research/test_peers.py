"""Other engines compared with this one: what is counted, what they are asked for, who is missing."""

import itertools
import sys
import types
from typing import ClassVar
from unittest.mock import MagicMock

import numpy as np
import pytest

import medusa_jax
from medusa_jax import Options, Tree, UserError
from medusa_jax.api import Model
from medusa_jax.evaluate.race import Contender, Run, ourselves, race
from medusa_jax.heads.registry import drafter_class, make_drafter
from research.peers import Setting, huggingface, llamacpp


def test_figures_are_medians_of_runs_made_in_turn():
    """Of 4 tokens one or two come with the first; the slow run of each prompt does not count."""
    calls = []

    def contender(name, tokens, seconds, first=1):
        lengths = itertools.cycle([seconds, 100 * seconds, seconds])

        def decode(prompt):
            calls.append((name, tuple(prompt)))
            if len(calls) <= 2:  # before anything counts
                return Run([tokens], 1e9, 1e9)
            return Run([tokens], 0.5, next(lengths), first)

        return Contender(name, decode, "float32")

    ours = contender("ours", [1, 2, 3, 4], 0.03)
    peer = contender("peer", [1, 2, 9, 4], 0.04, first=2)
    one, two = race([ours, peer], [[7], [8, 8]], 3)
    assert calls[:2] == [("ours", (7,)), ("peer", (7,))]
    in_turn = [("ours", "peer")] * 6
    names = [name for name, _ in calls[2:]]
    assert list(zip(names[::2], names[1::2])) == in_turn
    assert [p for _, p in calls[2:]] == [(7,)] * 6 + [(8, 8)] * 6
    assert one["tokens_per_second"] == pytest.approx(3 / 0.03)
    assert two["tokens_per_second"] == pytest.approx(2 / 0.04)
    assert one["prompt_tokens_per_second"] == pytest.approx(3 / 1.0)
    assert (one["speedup"], two["speedup"]) == pytest.approx((1, 0.5))
    assert (one["agreement"], two["agreement"]) == (1, 0.5)


@pytest.fixture(scope="module")
def model(directory):
    heads = str(directory / "heads")
    return medusa_jax.load(str(directory), heads, tree="chain:1", dtype="float32")


def test_this_engine_decodes_on_after_an_end_of_text(model, monkeypatch):
    """With every token an end of text, all that were asked for come, drafted and plain."""
    monkeypatch.setattr(model, "eos_ids", tuple(range(model.config.vocab_size)))
    options = Options(max_new_tokens=9, eos_ids=())
    plain, drafted = (ourselves(model, t, options) for t in (Tree.none(), Tree.chain(1)))
    assert (plain.label, plain.weights) == ("plain", "float32")
    assert (drafted.label, drafted.facts["tree_nodes"]) == ("medusa", 2)
    runs = [contender.decode([4, 5, 6]) for contender in (plain, drafted)]
    assert runs[0].tokens == 8 and runs[0].texts == runs[1].texts


class FakeLlama:
    """What is used of llama_cpp.Llama: it counts on from the prompt's last token."""

    made: ClassVar[list] = []

    def __init__(self, **settings):
        self.settings, self.clean = settings, True
        FakeLlama.made.append(self)

    def reset(self):
        self.clean = True

    def generate(self, tokens, *, temp, repeat_penalty):
        assert self.clean and (temp, repeat_penalty) == (0, 1)
        self.clean = False
        for i in itertools.count(1):
            yield tokens[-1] + i


def test_llama_cpp_runs_the_file_and_its_weights_in_float32(monkeypatch):
    module = types.SimpleNamespace(Llama=FakeLlama, GGML_TYPE_F32=0)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    drafter = types.SimpleNamespace(LlamaPromptLookupDecoding=dict)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", drafter)
    monkeypatch.setattr(FakeLlama, "made", [])
    monkeypatch.setattr(llamacpp, "block_type", lambda path: "Q4_1")
    monkeypatch.setattr(llamacpp, "as_float32", lambda path: f"{path} in float32")
    found = llamacpp.contenders(Setting("a.gguf", 3, 40, 3, 0))
    assert [(c.label, c.weights) for c in found] == [
        ("llama.cpp", "F32"),
        ("llama.cpp", "Q4_1"),
        ("llama.cpp, prompt lookup", "Q4_1"),
    ]
    alike, own, drafting = (llama.settings for llama in FakeLlama.made)
    # Drafts go beyond the last token that is asked for.
    given = {"draft_model": {"num_pred_tokens": 2}, "n_ctx": 42}
    assert drafting == own | given
    assert (alike["model_path"], own["model_path"]) == ("a.gguf in float32", "a.gguf")
    assert (alike["type_k"], alike["type_v"]) == (0, 0) and "type_k" not in own
    for settings in (alike, own):
        threads = (settings["n_threads"], settings["n_threads_batch"])
        assert threads == (3, 3) and settings["n_ctx"] == 40
    for contender in found:
        for _ in range(2):  # nothing is kept of the prompt before
            run = contender.decode([4, 5])
            assert run.texts == [[6, 7, 8]] and run.first == 1
    monkeypatch.setattr(llamacpp, "block_type", lambda path: "F32")
    assert len(llamacpp.contenders(Setting("a.gguf", 3, 40, 3, 0))) == 2


class Numbers:
    """A tensor as far as it is used."""

    def __init__(self, rows):
        self.rows = np.array(rows)

    def __getitem__(self, at):
        return Numbers(self.rows[at])

    def numel(self):
        return self.rows.size

    def tolist(self):
        return self.rows.tolist()


def fake_torch_and_transformers(asked):
    """Modules whose model emits 9, three at once first if it looks prompts up."""

    class Model:
        def eval(self):
            return self

        def generate(self, ids, *, attention_mask, generation_config, streamer):
            asked.append((self.generation_config, generation_config))
            n = generation_config["max_new_tokens"]
            first = 3 if "prompt_lookup_num_tokens" in generation_config else 1
            for size in (ids.numel(), first, *[1] * (n - first)):
                streamer.put(Numbers([0] * size))
            streamer.end()
            return Numbers([[*ids.rows[0], *[9] * n]])

    torch = MagicMock(float32="float32", tensor=Numbers, ones_like=lambda x: x)
    torch.set_num_threads = asked.append
    transformers = MagicMock(GenerationConfig=lambda **fields: fields)

    def from_pretrained(path, dtype, trust_remote_code):
        asked.append((path, dtype, trust_remote_code))
        return Model()

    transformers.AutoModelForCausalLM.from_pretrained = from_pretrained
    return {"torch": torch, "transformers": transformers}


def test_transformers_decodes_greedily_and_with_prompt_lookup(monkeypatch):
    asked = []
    for name, module in fake_torch_and_transformers(asked).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(huggingface, "resolve", lambda path: path)
    plain, lookup = huggingface.contenders(Setting("somewhere", 6, 40, 2, 5))
    assert asked == [2, ("somewhere", "float32", False)]
    runs = [contender.decode([4, 5]) for contender in (plain, lookup)]
    assert [run.texts for run in runs] == [[[9] * 6]] * 2
    assert [run.first for run in runs] == [1, 3]
    assert all(run.prefill_seconds > 0 and run.decode_seconds > 0 for run in runs)
    (defaults, first), (_, second) = asked[2:]
    assert defaults == {}  # what the model's files say ends no text
    assert second.pop("prompt_lookup_num_tokens") == 10 and first == second
    assert first["max_new_tokens"] == 6 and first["do_sample"] is False
    assert first["no_repeat_ngram_size"] == 5 and "eos_token_id" not in first


def test_what_is_not_there_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"pip install 'medusa-jax\[llamacpp\]'"):
        llamacpp.contenders(Setting("a.gguf", 3, 40, 3, 0))
    with pytest.raises(UserError, match=r"pip install 'medusa-jax\[torch\]'"):
        huggingface.contenders(Setting("somewhere", 6, 40, 2, 0))
    for model in (None, "some/directory"):
        with pytest.raises(UserError, match=r"is no GGUF file, which llama\.cpp needs"):
            llamacpp.contenders(Setting(model, 3, 40, 3, 0))


def test_a_file_that_llama_cpp_refuses(monkeypatch):
    def refuse(**_):
        raise ValueError("unknown architecture")

    module = types.SimpleNamespace(Llama=refuse, GGML_TYPE_F32=0)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setattr(llamacpp, "block_type", lambda path: "F32")
    monkeypatch.setattr(llamacpp, "as_float32", lambda path: path)
    with pytest.raises(UserError, match=r"cannot load a\.gguf: unknown architecture"):
        llamacpp.contenders(Setting("a.gguf", 3, 40, 3, 0))


def test_plain_decoding_is_the_same_program_whatever_the_heads(model):
    """Hydra++ has a layer that every accepted position goes through; plain decoding has not."""
    heads = drafter_class("hydrapp").Config(n_heads=2)
    other = Model(
        model.config,
        model.variables | {"heads": {"prefix": {}}},
        model.tokenizer,
        make_drafter(heads, model.config),
        dtype=model.dtype,
        mesh=model.mesh,
        tree="chain:1",
    )
    assert other.engine(tree="none") == model.engine(tree="none")
    assert other.engine(tree="chain:1").drafter is other.drafter
