"""Training against loops: the marks, the batches, resuming, bad flags."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_jax.demo import refine
from medusa_jax.demo.refine import (
    completes_repeat,
    learnt_row,
    marked_row,
    stock_phrases,
)
from medusa_jax.text_stats import repeated_ngram_share


def test_the_docstring_example():
    a, b, c = 0, 1, 2
    got = completes_repeat(np.array([a, b, a, b, c, a, b]), n=2)
    assert got.tolist() == [False, False, False, True, False, False, True]


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4))
def test_a_token_is_marked_if_its_ngram_stands_earlier(tokens, n):
    got = completes_repeat(np.array(tokens, np.int32), n)
    for t in range(len(tokens)):
        gram = tokens[t - n + 1 : t + 1] if t >= n - 1 else None
        earlier = [tokens[s - n + 1 : s + 1] for s in range(n - 1, t)]
        assert got[t] == (gram is not None and gram in earlier)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=60))
def test_marks_are_the_share(tokens):
    assert completes_repeat(np.array(tokens)).sum() == pytest.approx(
        repeated_ngram_share(tokens) * (len(tokens) - 3)
    )


def test_prompts_are_context_and_so_is_new_text():
    prompt, text = [1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 4, 5, 1, 2, 3, 4]
    row = marked_row(prompt, text, 0.1, 20)
    assert row["tokens"].tolist() == [*prompt, *text, 0, 0, 0]
    assert row["counted"].tolist() == [0] * 16 + [-1] + [0] * 3
    assert row["segment_ids"].tolist() == [1] * 17 + [0] * 3
    assert row["positions"].tolist() == [*range(17), 0, 0, 0]
    # 2 3 4 5 stands in other texts: so does 5 after 2 3 4.
    stock = stock_phrases([text, [2, 3, 4, 5], [2, 3, 4, 5, 6]], 2)
    assert stock == {(2, 3, 4, 5)}
    assert marked_row(prompt, text, 0.1, 20, stock)["counted"].tolist() == (
        [0] * 12 + [-1, 0, 0, 0, -1] + [0] * 3
    )
    learnt = learnt_row(prompt, text, 20)
    assert learnt["counted"].tolist() == [0] * 8 + [1] * 9 + [0] * 3
    assert learnt["tokens"].tolist() == row["tokens"].tolist()
    # One of six 4-grams is old: allowed, if a fifth is.
    assert not marked_row(prompt, text, 0.2, 20)["counted"].any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Corpus, held-out text and prompts for the bundled backbone."""
    work = tmp_path_factory.mktemp("refine")
    tokens = np.random.default_rng(0).integers(0, 4000, 2000).astype(np.uint16)
    for name in ("train", "heldout"):
        (work / name).mkdir()
        np.save(work / name / "tokens.npy", tokens)
        np.save(work / name / "doc_starts.npy", np.array([0]))
    lines = [json.dumps({"prompt_ids": list(range(k, k + 9))}) + "\n" for k in range(40)]
    (work / "answer_seeds.jsonl").write_text("".join(lines))
    return work


def run(work, out, steps, *more):
    return refine.main(
        [
            "--model=medusa_jax/demo/backbone", f"--work={work}", f"--out={out}", "--own=2", "--varied=1",
            "--renew=2", "--max_new_tokens=12", "--config.train.batch_size=3",
            "--config.data.seq_len=24", "--config.train.save_every=2",
            "--config.data.eval_samples=3", "--config.train.log_every=1",
            "--config.optim.schedule=constant", "--config.optim.warmup_steps=1", "--config.train.loss_chunk=24",
            f"--config.train.steps={steps}", *more,
        ]
    )  # fmt: skip


def losses(out):
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [
        (r["step"], r["loss"][0], r["unlikelihood"])
        for r in records
        if r["kind"] == "train"
    ]


def test_a_run_resumed_is_the_run(folder, tmp_path, capsys):
    """New text is written by the model as it is: what was written before a stop comes again."""
    assert run(folder, tmp_path / "whole", 4) == 0
    assert run(folder, tmp_path / "cut", 3) == 0  # between two writings
    shutil.rmtree(tmp_path / "cut" / "export")
    capsys.readouterr()
    assert run(folder, tmp_path / "cut", 4) == 0
    # Step 4 goes on with the text that step 3 wrote.
    assert "before step" not in capsys.readouterr().err
    whole, cut = losses(tmp_path / "whole"), losses(tmp_path / "cut")
    assert [step for step, *_ in whole] == [1, 2, 3, 4] and cut == whole
    # Not one and the same batch, and written anew by another model.
    assert len({loss for _, loss, _ in whole}) == 4
    assert (tmp_path / "cut" / "export" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--own=3",), "leave rows for the corpus"),
        (("--varied=3",), "--varied is 0 to --own 2"),
        (("--work=nowhere",), "nowhere"),
        (("--renew=0",), "--renew is 1 or more"),
        (("--max_new_tokens=16",), "data.seq_len is 24"),
        (("--steps=3",), "unknown flag --steps=3"),
    ],
)
def test_bad_flags_are_one_sentence(folder, tmp_path, capsys, flags, words):
    assert run(folder, tmp_path, 2, *flags) == 2
    assert words in capsys.readouterr().err
