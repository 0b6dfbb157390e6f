"""`--tree auto`: trees change while a text is decoded and the text does not; what is learned is kept."""

import dataclasses
import json
import shutil

import pytest
from tiny import write_model

import medusa_jax
from medusa_jax import Options, Tree, UserError
from medusa_jax.api import automatic
from medusa_jax.api.automatic import tokens_by_size
from medusa_jax.api.dialogue import Dialogue
from medusa_jax.decoding import step_times
from medusa_jax.decoding.step_times import Learned

GROWTH = [[-1], [0], [0, 0], [1], [-1, -1], [0, 1], [2], [1, 0], [3]]
LADDER = {1: 1.0, 2: 1.5, 3: 1.9, 4: 2.0, 6: 2.1, 8: 2.2}
OPTIONS = Options(max_new_tokens=60, eos_ids=())
PROMPTS = ["the cat in the", "abc abc ab"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_model(path, max_position=512)
    ladder = [
        {"nodes": n, "tokens_per_step": t, "step_latency_ratio": 1 + n / 20}
        for n, t in LADDER.items()
    ]
    file = {"choices": GROWTH[:3], "growth": GROWTH, "evidence": {"ladder": ladder}}
    (path / "heads" / "tree.json").write_text(json.dumps(file))
    shutil.copytree(path / "heads", path / "own")
    (path / "own" / "tree.json").unlink()
    return path


@pytest.fixture
def free(monkeypatch, tmp_path):
    """Trees are automatic, and nothing is known of this device."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(automatic.VARIABLE)


def load(directory, drafter="", **more):
    drafter = drafter.format(directory=directory) or str(directory / "heads")
    return medusa_jax.load(str(directory), drafter, **more)


@pytest.mark.parametrize(
    "drafter",
    [
        "{directory}/own",
        "prompt_lookup",
        pytest.param("draft_model:{directory}", marks=pytest.mark.wide),
        pytest.param(
            "examples.lookahead:Lookahead:window=3:ngram=3:guesses=2",
            marks=pytest.mark.wide,
        ),
    ],
)
def test_text_does_not_depend_on_the_trees(directory, drafter, free):
    """Greedy and sampled rows together, over a cache that grows; whole texts and streams."""
    model = load(directory, drafter, dtype="float32")
    rows = [Options(150, temperature, eos_ids=()) for temperature in (0.0, 0.9)]
    plain = [r.token_ids for r in model.generate(PROMPTS, rows, tree="none")]
    for rate in (0.05, 0.9):
        model.automatic.learned(2, "sampled").acceptance_rate = rate
        found = model.generate(PROMPTS, rows)
        assert [r.token_ids for r in found] == plain
        for result in found:
            counted = enumerate(result.acceptance_histogram, 1)
            assert sum(n * k for n, k in counted) == 149
            assert result.steps == sum(result.acceptance_histogram)
    *_, (_, streamed) = model.stream(PROMPTS, rows)
    assert [r.token_ids for r in streamed] == plain


def test_lookups_draft_once_the_text_repeats(directory, free):
    """Plain steps check the draft that they do not verify; here the text is one token throughout."""
    model = load(directory, "prompt_lookup")
    model.automatic.learned(1).acceptance_rate = 0.05
    options = dataclasses.replace(OPTIONS, max_new_tokens=150, logit_bias={9: 1e3})
    [result] = model.generate(PROMPTS[:1], options)
    assert set(result.token_ids) == {9}
    assert result.accepted_lengths[0] == 1 and result.steps < 75


def times(learned, size, ratio):
    for load in range(1, step_times.KNOWN + 1):
        learned.add(1, load)
        learned.add(size, load * ratio)


def test_step_times_follow_measurements_on_this_device():
    learned = Learned({1: 1.0, 3: 1.2, 6: 1.5}, {})
    assert learned.ratio(6) == 1.5 and learned.note() == {}
    learned.add(3, 0.014)
    learned.add(3, 0.014)
    assert learned.ratio(3) == 1.2  # no plain step was timed
    times(learned, 3, 1.4)
    learned.add(1, 0.5)  # a moment in which the machine was busy
    assert learned.ratio(3) == pytest.approx(1.4)
    assert learned.ratio(6) == pytest.approx(2.0)  # 0.4 for two nodes is 1.0 for five
    learned.acceptance_rate = 0.25
    again = Learned({1: 1.0, 3: 1.2, 6: 1.5}, learned.note())
    assert again.ratio(3) == pytest.approx(1.4) and again.acceptance_rate == 0.25


def test_an_accelerator_may_use_more_than_the_evidence_reaches(monkeypatch):
    growth = [[i] for i in range(70)]
    evidence = {"ladder": [{"nodes": 8, "tokens_per_step": 2.2}]}
    file = {"growth": growth, "evidence": evidence}
    assert tokens_by_size(file) == {1: 1.0, 8: 2.2}
    monkeypatch.setattr(automatic.jax, "default_backend", lambda: "gpu")
    assert tokens_by_size(file) == {1: 1.0, 8: 2.2, 64: 2.2}
    assert tokens_by_size({"growth": growth}) == {}


@pytest.mark.parametrize(
    "drafter, depths",
    [
        ("prompt_lookup", [0, 2, 10]),
        ("{directory}/own", [0, 2, 3]),
        ("{directory}/heads", []),
    ],
)
def test_trees_to_choose_from(directory, drafter, depths, free):
    model = load(directory, drafter)
    assert [tree.depth for tree in model.automatic.gated] == depths


def test_a_tree_files_choice_follows_the_steps_of_this_device(directory, free):
    """The next process has another tree; this one does not compile a second program."""
    model = load(directory)
    assert model.tree.n_nodes == 4 and model.tree_at(2).n_nodes == 4
    learned = model.automatic.learned(1)
    times(learned, 4, 1.6)
    model.automatic.keep(learned, "1 greedy")
    assert model.tree_at(1).n_nodes == 4
    again = load(directory, all_heads=False)
    assert again.tree.n_nodes == 3 and again.tree_at(2).n_nodes == 4
    sampled = dataclasses.replace(OPTIONS, temperature=0.5)
    for options, nodes in ((OPTIONS, 3), (sampled, 4)):
        [result] = again.generate(PROMPTS[:1], options)
        assert result.tree_nodes == nodes
    file = again.automatic.cache.file
    file.write_text('{"1 greedy": {"ratios": {"4": [9, 9, 9]}}}')  # drafts have lost
    assert load(directory).tree == Tree.none()
    for damaged in ("{", "[]", '{"1 greedy": 7}', '{"1 greedy": {"ratios": {"4": 7}}}'):
        file.write_text(damaged)
        assert load(directory).tree.n_nodes == 4


def test_requests_time_their_steps(directory, free, monkeypatch):
    """Plain ones and those with drafts; with a tree file every pair is a sample, and a note is written."""
    # Steps of a tiny model may end before the host looks.
    monkeypatch.setattr(step_times, "is_ready", lambda progress: False)
    for drafter in ("prompt_lookup", ""):
        model = load(directory, drafter)
        learned = model.automatic.learned(1)
        for _ in range(step_times.KNOWN):
            learned.acceptance_rate = 0.7
            list(model.stream(PROMPTS[:1], OPTIONS))
            list(model.stream(PROMPTS[:1], OPTIONS, tree="none"))
        assert learned.samples
    note = json.loads(model.automatic.cache.file.read_text())["1 greedy"]["ratios"]
    assert len(note["4"]) == len(learned.samples[4]) >= step_times.KNOWN


def test_where_the_tree_stays_the_same(directory, free, monkeypatch):
    """Rules that read drafts, a limit of steps, 16 bits, an explicit tree, several hosts."""
    model = load(directory, "prompt_lookup")

    def chooses(model=model, options=OPTIONS, **more):
        return bool(model.plan(["the"], options, None, more)[1].gated)

    assert chooses() and chooses(tree="auto") and chooses(acceptance="sampled")
    assert not chooses(tree="chain:3") and not chooses(tree="none")
    assert not chooses(acceptance="typical") and not chooses(acceptance="rejection")
    assert not chooses(options=dataclasses.replace(OPTIONS, max_steps=9))
    assert not chooses(load(directory, "prompt_lookup", dtype="bfloat16"))
    for one in (load(directory), load(directory, tree="bundled"), load(directory, "none")):
        assert not chooses(one)
    with monkeypatch.context() as hosts:
        hosts.setattr(automatic.jax, "process_count", lambda: 2)
        assert not automatic.is_automatic()
    monkeypatch.setenv(automatic.VARIABLE, "bundled")
    assert not chooses(load(directory, "prompt_lookup"))
    assert load(directory).tree.n_nodes == load(directory, weights="int8").tree.n_nodes == 4
    monkeypatch.setenv(automatic.VARIABLE, "measured")
    with pytest.raises(UserError, match="is bundled or not set, not 'measured'"):
        load(directory)


def test_rungs_of_the_tree_file(directory, tmp_path):
    shutil.copytree(directory / "heads", tmp_path / "heads")
    file = tmp_path / "heads" / "tree.json"
    rungs = [{"batch": 1, "nodes": 4}, {"batch": 4, "nodes": 2}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"batches": rungs}))
    heads = str(tmp_path / "heads")
    model = load(directory, heads, tree="bundled")
    assert [model.tree_at(rows).n_nodes for rows in (1, 2, 4, 9)] == [4, 2, 2, 2]
    model = load(directory, heads, tree="3")
    assert [model.tree_at(rows).n_nodes for rows in (1, 4)] == [3, 3]
    for bad in ([{"batch": 1}], [{"batch": 0, "nodes": 2}], 7, [[1, 2]]):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"batches": bad}))
        with pytest.raises(UserError, match="batches"):
            load(directory, heads)


def test_a_conversation_reads_again_what_plain_steps_left_to_the_drafter(directory, free):
    model = load(directory, "draft_model:{directory}")
    model.automatic.learned(1).expected = {1: 1.0, 3: 9.0, 5: 9.0}
    talk, prompt = Dialogue(model), model.encode(PROMPTS[0])
    for new in ("in", "at"):
        *_, (_, [result]) = talk.stream(prompt, OPTIONS)
        [alone] = model.generate([prompt], OPTIONS, tree="none")
        assert result.token_ids == alone.token_ids
        prompt = [*prompt, *result.token_ids, *model.encode(new)[1:]]
    assert 0 < talk.reused < len(prompt) - 2
