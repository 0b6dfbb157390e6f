"""SmolLM2-135M-Instruct from its GGUF file against transformers reading the same file."""

import importlib.util
import os

import pytest
from gguf_files import strings

import medusa_jax
from medusa_jax import Options
from medusa_jax.files.known import file_of, named_model
from medusa_jax.text.chat import encode_prompt

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMOLLM2 = named_model("smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec(SMOLLM2.package) is None, reason=f"needs {SMOLLM2.install}"
    ),
]

NEW = 64
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that reverses a list.",
    "A train travels 120 km in 90 minutes. How fast is it in km/h?",
    "List five vegetables.",
    "Translate to Spanish: good morning, my friends.",
    "Who wrote Hamlet, and when?",
]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>"]


@pytest.fixture(scope="module")
def ours():
    return medusa_jax.load("smollm2", dtype="float32")


@pytest.fixture(scope="module")
def their_tokenizer():
    folder, file = os.path.split(file_of(SMOLLM2))
    return transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)


@pytest.fixture(scope="module")
def theirs():
    pytest.importorskip("accelerate")
    folder, file = os.path.split(file_of(SMOLLM2))
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32
    ).eval()


def test_greedy_text(ours, theirs):
    prompts = [encode_prompt(ours.tokenizer, question) for question in QUESTIONS]
    results = ours.generate(prompts, Options(max_new_tokens=NEW))
    tokens = 0
    for prompt, result in zip(prompts, results):
        with torch.no_grad():
            how = {"max_new_tokens": NEW, "do_sample": False}
            ids, seen = torch.tensor([prompt]), torch.ones(1, len(prompt))
            ends = {"eos_token_id": 2, "pad_token_id": 2}
            whole = theirs.generate(ids, attention_mask=seen, **how, **ends)[0].tolist()
        new = [token for token in whole[len(prompt) :] if token != 2]
        assert ours.tokenizer.decode(result.token_ids) == ours.tokenizer.decode(new)
        tokens += len(new)
    assert tokens > 200


def test_token_ids(ours, their_tokenizer):
    """Their reader knows GPT-2's splitting only; the model's own puts each digit apart first, so
    that blanks before a digit are one token. With that step before theirs all are equal.
    """
    from tokenizers import pre_tokenizers

    texts = strings(1000, SPECIAL)
    own = [ours.tokenizer.encode(text) for text in texts]
    backend = their_tokenizer.backend_tokenizer

    def encode(text):
        return backend.encode(text, add_special_tokens=False).ids

    differ = [text for text, ids in zip(texts, own) if encode(text) != ids]
    print(f"{len(differ)} of {len(texts)} strings differ without the model's own splitting")
    assert all(any(c.isnumeric() for c in text) for text in differ)
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    assert [encode(text) for text in texts] == own
    for text, ids in zip(texts, own):
        assert ours.tokenizer.decode(ids, skip_special=False) == text
