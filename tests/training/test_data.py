"""Rows: nothing lost, nothing twice, no target across a sample's border."""

import numpy as np
import pytest
from files import write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from training_setup import VOCAB, write_tokens

from medusa_jax.commands.train import prompts_in
from medusa_jax.config import DataConfig
from medusa_jax.distill.files import write_token_directory
from medusa_jax.errors import UserError
from medusa_jax.training.data import sources
from medusa_jax.training.data.rows import TokenRows, batches, first_fit, held_out, mix
from medusa_jax.training.data.texts import read_texts


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=60),
    st.integers(20, 40),
    st.integers(1, 6),
)
def test_first_fit_places_every_sample_once_and_whole(lengths, capacity, open_rows):
    rows = first_fit(np.array(lengths), capacity, open_rows)
    assert sorted(i for row in rows for i in row.tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= capacity for row in rows)


def open_rows(directory, packing, seq_len=40, **kwargs):
    cfg = DataConfig(source=str(directory), seq_len=seq_len, packing=packing, seed=3)
    return TokenRows(str(directory), cfg, VOCAB, **kwargs)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), packing=st.sampled_from(["first_fit", "concat"]))
def test_segments_are_stretches_of_one_sample(tmp_path_factory, seed, packing):
    directory = tmp_path_factory.mktemp("tokens")
    write_tokens(directory, n=600, seed=seed)
    # Token ids that tell the place: id = offset in the stream.
    np.save(directory / "tokens.npy", np.arange(600, dtype=np.int32))
    starts = np.load(directory / "doc_starts.npy")
    cfg = DataConfig(seq_len=40, packing=packing, seed=seed)
    rows = TokenRows(str(directory), cfg, 600)
    batch = rows.batch(range(2 * rows.rows))
    columns = (batch[name] for name in ("tokens", "positions", "segment_ids"))
    for tokens, positions, segments in zip(*columns):
        for s in np.unique(segments[segments > 0]):
            inside = segments == s
            stretch = tokens[inside]
            assert np.array_equal(np.diff(stretch), np.ones(len(stretch) - 1))
            assert np.array_equal(positions[inside], np.arange(len(stretch)))
            sample = np.searchsorted(starts, stretch, side="right")
            assert np.all(sample == sample[0])
    if packing == "first_fit":
        used = batch["tokens"][: rows.rows][batch["segment_ids"][: rows.rows] > 0]
        lengths = np.minimum(np.diff(starts, append=600), 40)
        expected = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, lengths)])
        assert np.array_equal(np.sort(used), expected)


def test_epochs_differ_but_hold_the_same_rows(tmp_path):
    write_tokens(tmp_path)
    rows = open_rows(tmp_path, "first_fit")
    one, two = np.split(rows.batch(range(2 * rows.rows))["tokens"], 2)
    assert not np.array_equal(one, two)
    assert sorted(map(bytes, one)) == sorted(map(bytes, two))


def test_a_stream_shorter_than_a_row_is_padded(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(10, dtype=np.int32))
    batch = open_rows(tmp_path, "concat").batch(range(2))
    assert batch["segment_ids"].sum(axis=1).tolist() == [10, 10]


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("tokens.npy", np.full(4000, 99, np.int32), ["99", str(VOCAB)]),
        ("tokens.npy", np.zeros(0, np.int32), ["tokens.npy"]),
        ("counted.npy", np.ones(3, bool), ["counted.npy", "4000 values"]),
        ("counted.npy", np.full(4000, -1, np.int8), ["counted.npy", "1 or 0"]),
        ("doc_starts.npy", np.array([5, 3]), ["doc_starts.npy", "rise"]),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, name, array, words):
    write_tokens(tmp_path)
    np.save(tmp_path / name, array)
    with pytest.raises(UserError) as error:
        open_rows(tmp_path, "concat")
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("packing", ["first_fit", "concat"])
def test_several_texts_are_mixed_row_by_row(tmp_path, packing):
    """An epoch has every row of every text once, in an order that mixes them."""
    texts = []
    for seed, n in ((0, 600), (1, 1000)):
        directory = tmp_path / str(seed)
        directory.mkdir()
        write_tokens(directory, n=n, seed=seed)
        texts.append(open_rows(directory, packing))
    both = mix(texts)
    assert both.rows == texts[0].rows + texts[1].rows
    expected = [text.row(i)["tokens"].tolist() for text in texts for i in range(text.rows)]
    epoch = both.batch(range(both.rows))["tokens"].tolist()
    assert sorted(epoch) == sorted(expected)
    first_of_each = [expected[0], expected[texts[0].rows]]
    assert epoch != expected and all(row in epoch for row in first_of_each)
    assert mix(texts[:1]) is texts[0]
    # For evaluation, which reads the first rows, the texts take turns.
    texts = [open_rows(text.directory, packing, shuffle=False) for text in texts]
    first = mix(texts).batch(range(4))["tokens"]
    turns = [text.row(i)["tokens"] for i in range(2) for text in texts]
    assert np.array_equal(first, turns)


def test_held_out_samples_are_in_no_training_row(tmp_path):
    """Every sample is in one part, evenly spread."""
    write_tokens(tmp_path, n=600)
    np.save(tmp_path / "tokens.npy", np.arange(600, dtype=np.int32))
    cfg = DataConfig(seq_len=40, packing="first_fit", held_out=0.2)
    ids = []
    for name in ("train", "held out", ""):
        part = TokenRows(str(tmp_path), cfg, 600, part=name)
        batch = part.batch(range(part.rows))
        ids.append(set(batch["tokens"][batch["segment_ids"] > 0].tolist()))
    train, held, every = ids
    assert train | held == every and not train & held
    assert 0.1 < len(held) / len(every) < 0.3
    assert np.flatnonzero(held_out(6, 1 / 3)).tolist() == [1, 4]
    assert held_out(2, 0.05).sum() == 1 and not held_out(1, 0.05).any()
    assert held_out(2, 0.9).sum() == 1  # something is left to learn from


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_only_tokens_within_rows_count_and_the_others_are_reported(tmp_path, capsys, share):
    data = tmp_path / "data"
    write_tokens(data, n=600)
    np.save(data / "counted.npy", np.arange(600) % 3 > 0)
    cfg = DataConfig(source=str(data), seq_len=20, packing="first_fit", held_out=share)
    kept = np.zeros(VOCAB, int)
    texts = read_texts(cfg, "", "", VOCAB)
    for part in [*texts.train, *texts.held_out]:
        rows = part.batch(range(part.rows))
        inside = np.bincount(rows["tokens"][rows["counted"]], minlength=VOCAB)
        assert np.array_equal(part.counts(VOCAB), inside)
        kept += inside
    said = f"{400 - kept.sum()} of 400 counted tokens lie beyond data.seq_len"
    assert 0 < kept.sum() < 400 and capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize(
    ("name", "array", "fields"),
    [
        ("counted.npy", np.arange(40) % 20 >= 16, {}),  # prompts fill the rows
        ("counted.npy", np.zeros(40, bool), {"packing": "concat"}),
        ("doc_starts.npy", np.array([0, 0]), {"held_out": 0.5}),
        ("doc_starts.npy", np.arange(40), {}),
    ],
)
def test_a_text_with_nothing_to_predict_is_refused(tmp_path, name, array, fields):
    tokens = {"tokens.npy": np.arange(40), "doc_starts.npy": np.array([0, 20])}
    for file, values in (tokens | {name: array}).items():
        np.save(tmp_path / file, values)
    cfg = DataConfig(str(tmp_path), seq_len=16, **fields)
    with pytest.raises(UserError, match="no counted token is left within"):
        read_texts(cfg, "", "", VOCAB)


def test_limits_hold_for_token_directories(tmp_path, capsys):
    """As for text: of the first samples those whose counted tokens do not repeat themselves."""
    answers, source = [[*range(10, 19)], [7] * 12, [20], [30]], str(tmp_path)
    samples = [{"prompt_ids": [5] * 9, "token_ids": answer} for answer in answers]
    write_token_directory(tmp_path, samples)
    cfg = DataConfig(source, eval_source=source, seq_len=60)
    cfg.max_samples, cfg.max_repeats, cfg.eval_samples = 3, 0.5, 1
    texts = read_texts(cfg, "", f"{tmp_path}/w", VOCAB)
    seen = [text.batch(range(text.rows)) for text in [*texts.train, *texts.held_out]]
    learned, other = (sorted(x["tokens"][x["counted"]].tolist()) for x in seen)
    assert (learned, other) == ([*answers[0], 20], answers[0])
    said = capsys.readouterr().err
    assert "2 of 3 samples used (2 x tokens)" in said
    assert "1 samples skipped (1 x repeats itself, first in sample 2)" in said
    cfg = DataConfig(source, max_samples=4)  # it has no more
    assert read_texts(cfg, "", "", VOCAB).train[0].directory == source
    read_texts(DataConfig(source, held_out=0.5, max_samples=1), "", f"{tmp_path}/w", VOCAB)
    assert "nothing is evaluated: data.held_out" in capsys.readouterr().err


def test_several_texts_for_evaluation(tmp_path):
    paths = [write_tokens(tmp_path / name, n=40) for name in "ab"]
    cfg = DataConfig(paths[1], eval_source=", ".join(paths), seq_len=16)
    assert [text.directory for text in read_texts(cfg, "", "", VOCAB).held_out] == paths
    assert prompts_in(cfg) == ""
    write_lines(tmp_path / "b" / "prompts.jsonl", [{"prompt_ids": [5]}])
    assert prompts_in(cfg) == f"{paths[1]}/prompts.jsonl"
    assert prompts_in(DataConfig(paths[1], eval_source=__file__)) == __file__
    cfg.eval_source += f",{tmp_path}/none.jsonl"
    with pytest.raises(UserError, match="no file or token directory /"):
        sources.check_all_exist(cfg)
    comma = write_tokens(tmp_path / "a,b", n=40)  # one directory, not two
    texts = read_texts(DataConfig(comma, eval_source=comma, seq_len=16), "", "", VOCAB)
    assert [text.directory for text in texts.train + texts.held_out] == [comma, comma]


# The input pipeline: what a step reads is a function of its number.


@pytest.mark.parametrize("own", [None, np.array([2, 3, 6, 7])])
def test_steps_in_order_and_resumed_anywhere(tokens, own):
    """Through several epochs: the batches of the rows themselves, from whatever step on.

    Of two microbatches of four rows a process may have the last two each.
    """
    rows = open_rows(tokens, "concat", 16)
    last = 3 * rows.rows // 8
    for first in (1, 2, last - 3):
        read = list(batches(rows, 8, first, last, own))
        assert len(read) == last - first + 1
        for n, batch in enumerate(read, first):
            expected = open_rows(tokens, "concat", 16).batch(range((n - 1) * 8, n * 8))
            for name, x in expected.items():
                np.testing.assert_array_equal(batch[name], x if own is None else x[own])


def test_what_goes_wrong_while_reading_reaches_the_run(tokens):
    class Broken(TokenRows):
        def batch(self, numbers):
            raise UserError("tokens.npy has gone")

    rows = Broken(tokens, DataConfig(seq_len=16, packing="concat"), 64)
    with pytest.raises(UserError, match=r"tokens\.npy has gone"):
        list(batches(rows, 8, 1, 3))
