"""Greedy text of the decode loop against `transformers.generate`, on the parity models."""

import itertools

import numpy as np
import pytest
from test_hf_parity import CASES, SMALL, V, build

import medusa_jax
from medusa_jax import Options

torch = pytest.importorskip("torch")

NEW = 40
# Each costs some seconds of compiling; the late window has the biases of Qwen2 as well.
LEFT_OUT = {"llama_biases", "qwen2_biases"}


@pytest.mark.parametrize(
    ("case", "ngram"),
    [*((case, 0) for case in sorted(set(CASES) - LEFT_OUT)), ("llama_tied", 2)],
)
def test_greedy_text_is_the_same(case, ngram, tmp_path, byte_level_dir):
    """`ngram`: no_repeat_ngram_size, as the model's own generation_config.json says it."""
    theirs = build(case, str(tmp_path))
    theirs.generation_config.no_repeat_ngram_size = ngram
    theirs.generation_config.save_pretrained(str(tmp_path))
    ours = medusa_jax.load(
        str(tmp_path), drafter="none", dtype="float32", tokenizer=str(byte_level_dir)
    )
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
