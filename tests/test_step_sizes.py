"""`--tree auto`: sizes change while a text is decoded and the text does not, and costs are measured while it grows."""

import dataclasses
import itertools
import json
import operator
import shutil

import numpy as np
import pytest
from cases import wide
from tiny import write_model

import medusa_jax
from medusa_jax import Options, Tree, UserError
from medusa_jax.api import dialogue, tree_choice
from medusa_jax.api.dialogue import Dialogue
from medusa_jax.api.tree_choice import TreeChoice
from medusa_jax.decoding import chunk_clock
from medusa_jax.decoding.chunk_clock import ChunkClock
from medusa_jax.decoding.copies import NGRAM, REPEATS
from medusa_jax.decoding.generation import begin
from medusa_jax.decoding.loop import decode_loop
from medusa_jax.decoding.tree_size.costs import StepCosts
from medusa_jax.decoding.tree_size.gate import Gate
from medusa_jax.decoding.tree_size.rates import RECENT
from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.model.stored import Storage
from medusa_jax.tree.files import TreeFile

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
    file = {"choices": GROWTH[:5], "growth": GROWTH, "evidence": {"ladder": ladder}}
    (path / "heads" / "tree.json").write_text(json.dumps(file))
    shutil.copytree(path / "heads", path / "own")
    (path / "own" / "tree.json").unlink()
    return path


@pytest.fixture
def free(monkeypatch, tmp_path):
    """Steps choose sizes, and no costs are known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(tree_choice.VARIABLE)


@pytest.fixture
def costs(monkeypatch):
    """What steps of the sizes cost, instead of their times on this device; no chunk has to time one."""
    costs = []
    monkeypatch.setattr(StepCosts, "ratios", lambda self, *sizes: np.float32(costs))
    monkeypatch.setattr(ChunkClock, "size_to_time", lambda self: None)
    return costs


def load(directory, drafter="", **more):
    drafter = drafter.format(directory=directory) or str(directory / "heads")
    return medusa_jax.load(str(directory), drafter, **more)


@pytest.mark.parametrize(
    ("drafter", "new"),
    [
        ("{directory}/heads", 90),
        *wide(
            ("{directory}/heads", 150),
            ("prompt_lookup", 150),
            ("draft_model:{directory}", 150),
            ("{directory}/own", 150),
        ),
    ],
)
def test_text_does_not_depend_on_the_sizes(directory, drafter, new, free, monkeypatch):
    """Greedy and sampled rows together, the longer ones over a cache that grows; whole texts and streams; sizes take turns."""
    monkeypatch.setattr(Gate, "fastest", in_turn)
    model = load(directory, drafter, dtype="float32")
    rows = [Options(new, temperature, eos_ids=()) for temperature in (0.0, 0.9)]
    plain = [r.token_ids for r in model.generate(PROMPTS, rows, tree="none")]
    *_, (_, streamed) = model.stream(PROMPTS, rows)
    for results in (model.generate(PROMPTS, rows), streamed):
        assert [r.token_ids for r in results] == plain
        for result in results:
            counted = enumerate(result.acceptance_histogram, 1)
            assert sum(n * k for n, k in counted) == new - 1
            assert result.steps == sum(result.acceptance_histogram)


def in_turn(gate, favoured_N):
    """Index [1] of another size after every second step."""
    return (gate.steps_N.sum(keepdims=True) // 2 % len(gate.depths)).astype("int32")


def test_lookups_draft_once_the_text_repeats(directory, free, costs, monkeypatch):
    """Plain steps check the draft that they do not verify; here the text is one token throughout."""
    monkeypatch.setattr(CpuKernels, "least_slots", 256)  # one program
    costs += [1.0, 1.9, 5.0]  # without evidence plain decoding begins
    model = load(directory, "prompt_lookup")
    options = dataclasses.replace(OPTIONS, max_new_tokens=150, logit_bias={9: 1e3})
    [result] = model.generate(PROMPTS[:1], options)
    assert set(result.token_ids) == {9}
    assert result.accepted_lengths[0] == 1 and result.steps < 75


@pytest.mark.parametrize(
    "drafter, nodes",
    [
        ("prompt_lookup", [1, 3, 11]),
        ("{directory}/own", [1, 3, 4]),
        ("{directory}/heads", [1, 3, 6]),
    ],
)
def test_sizes_are_nested(directory, drafter, nodes, free):
    model = load(directory, drafter)
    sizes = model.trees.sizes(model.tree)
    assert [tree.n_nodes for tree in sizes] == nodes
    assert all(set(a.choices) < set(b.choices) for a, b in itertools.pairwise(sizes))
    known = model.trees.tokens(sizes)
    assert known == ([1.0, 1.9, 2.1] if model.trees.file else None)


@pytest.mark.parametrize(
    ("drafter", "nodes", "device", "form"),
    [
        ("{directory}/own", 6, "cpu", {}),
        ("prompt_lookup", 3, "cpu", {}),
        ("none", 3, "cpu", {}),
        ("{directory}/heads", 4, "cpu", {"weights": "int8"}),  # narrow: the small tree
        ("{directory}/heads", 10, "gpu", {}),  # the file was fitted to another device
    ],
)
def test_copies_join_auto(directory, free, monkeypatch, drafter, nodes, device, form):
    monkeypatch.setattr(tree_choice.jax, "default_backend", lambda: device)
    model = load(directory, drafter, tree="auto+copy:2", **form)
    assert model.tree.n_nodes == nodes and len(model.tree.copied_C) == 2
    assert load(directory, drafter, **form).parse_tree("auto+copy:2") == model.tree


def test_few_nodes_where_weights_are_narrow_and_one_where_the_file_says_so(directory):
    assert tree_choice.is_narrow(Storage(weights="int8")) and not tree_choice.is_narrow(
        Storage()
    )
    file = TreeFile.read(directory / "heads" / "tree.json")
    fitted, trees = TreeChoice(file.tree, file), TreeChoice(Tree.none())
    assert fitted.first(file.tree, tree_choice.SMALL) == Tree.from_choices(GROWTH[:2])
    assert fitted.sizes(Tree.none()) == (Tree.none(),)
    assert trees.sizes(Tree.chain(1)) == (Tree.none(), Tree.chain(1))
    assert trees.sizes(Tree.chain(2)) == (Tree.none(), Tree.chain(1), Tree.chain(2))


@pytest.mark.wide
def test_a_pause_ends_with_its_chunk_and_with_the_text(directory, free):
    model = load(directory)
    options = dataclasses.replace(OPTIONS, max_new_tokens=20)
    _, engine, request = model.plan(PROMPTS[:1], options)
    state, _ = begin(engine, model.variables, request)
    state = state.replace(gate=state.gate.always(0))
    for most, steps in ((5, 5), (100, 19)):
        state, progress = decode_loop(engine, model.variables, state, np.int32(most))
        assert progress.gate.steps_N.tolist() == [steps, 0, 0]


def test_steps_after_a_short_match_do_not_copy(directory, free, costs):
    """The text, and as many steps of both kinds as one counts along it."""
    costs[:] = 1.0, 3.0, 0.1  # the largest size wherever there is a choice
    model = load(directory, "prompt_lookup")
    _, engine, request = model.plan(PROMPTS[1:], OPTIONS)
    state, _ = begin(engine, model.variables, request)
    _, progress = decode_loop(engine, model.variables, state, np.int32(100))
    [plain] = model.generate(PROMPTS[1:], OPTIONS, tree="none")
    assert progress.tokens_BO[0, :60].tolist() == plain.token_ids
    [prompt], steps_N = request.prompts, [0, 0, 0]
    text, at = [*prompt, *plain.token_ids], len(prompt)  # of the root
    while at < len(text) - 1:
        drafts = copies(text[: at + 1], engine.gated[-1].depth)
        steps_N[2 if drafts else 0] += 1
        right = map(operator.eq, drafts, text[at + 1 : -1])
        at += 1 + sum(itertools.takewhile(bool, right))
    assert progress.gate.steps_N.tolist() == steps_N and min(steps_N[::2]) > 3


def test_plain_steps_count_how_often_a_copy_would_be_right(directory, free, costs):
    costs[:] = 1.0, 99.0, 99.0  # no step drafts
    model = load(directory, "prompt_lookup")
    _, engine, request = model.plan(PROMPTS[1:], OPTIONS)
    state, _ = begin(engine, model.variables, request)
    _, progress = decode_loop(engine, model.variables, state, np.int32(100))
    [prompt], tokens = request.prompts, progress.tokens_BO[0, :60].tolist()
    text, keep = [*prompt, *tokens], 0.5 ** (1 / RECENT)
    right, tested = request.gate.accepted_L[0], request.gate.tested_L[0]
    for at in range(len(prompt), len(text) - 1):
        if draft := copies(text[: at + 1], 1):
            right = keep * right + (draft == [text[at + 1]])
            tested = keep * tested + 1
    gate = progress.gate
    np.testing.assert_allclose(
        (gate.accepted_L[0], gate.tested_L[0]), (right, tested), 1e-5
    )
    assert 2 < right < tested - 2 and not gate.steps_N[1:].any()


def copies(text, length):
    """What followed the latest occurrence of the last eight to two tokens, repeated as often as needed; [] for none."""
    for n in range(NGRAM, REPEATS - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return list(itertools.islice(itertools.cycle(text[end:]), length))
    return []


def test_steps_are_timed_while_they_decode(directory, free, monkeypatch):
    """Each size has been timed after some chunks, alone in its chunk; the text is that of plain decoding."""
    monkeypatch.setattr(chunk_clock, "WAITED", -1.0)
    monkeypatch.setattr(CpuKernels, "least_slots", 512)  # one program
    model = load(directory)
    _, engine, request = model.plan(PROMPTS[:1], OPTIONS)
    options = dataclasses.replace(OPTIONS, max_new_tokens=300)
    [result] = model.generate(PROMPTS[:1], options)
    [plain] = model.generate(PROMPTS[:1], options, tree="none")
    assert result.token_ids == plain.token_ids
    costs, nodes = model.trees.costs(engine), [t.n_nodes for t in engine.gated]
    assert costs is request.costs and len(nodes) == 3
    assert all(costs.chunks(1, n) > 1 and not costs.chunks(2, n) for n in nodes)


def test_costs_of_calibrate_if_it_ran_here(directory, tmp_path, free):
    shutil.copytree(directory / "heads", tmp_path / "heads")
    heads, file = str(tmp_path / "heads"), tmp_path / "heads" / "tree.json"
    rows = [{"nodes": n, "step_latency_ratio": r} for n, r in ((3, 1.25), (6, 1.5))]
    model = load(directory, heads)
    content = json.loads(file.read_text()) | {
        "mark": model.trees.mark,
        "acceptance": "greedy",
        "batches": [{"batch": 1, "nodes": 6, "rows": rows}],
    }
    file.write_text(json.dumps(content))
    model = load(directory, heads)

    def known(rows=1, **more):
        options = dataclasses.replace(OPTIONS, **more)
        _, engine, _ = model.plan(PROMPTS[:1] * rows, options)
        return model.trees.gate(engine, rows).ratio_N.tolist()

    assert known() == [1.0, 1.25, 1.5]
    assert known(rows=2) == known(temperature=0.5) == [1.0, 1.0, 1.0]
    file.write_text(json.dumps(content | {"mark": "another machine"}))
    model = load(directory, heads)
    assert known() == [1.0, 1.0, 1.0]


def test_where_the_tree_stays_the_same(directory, free, monkeypatch):
    """Rules that read drafts, 16 bits, an explicit tree, several hosts."""
    model = load(directory, "prompt_lookup")

    def chooses(model=model, options=OPTIONS, **more):
        return bool(model.plan(["the"], options, **more)[1].gated)

    assert chooses() and chooses(tree="auto") and chooses(acceptance="sampled")
    assert chooses(load(directory))
    assert not chooses(tree="copy:3") and not chooses(tree="none")
    assert not chooses(acceptance="typical") and not chooses(acceptance="rejection")
    assert not chooses(load(directory, "prompt_lookup", dtype="bfloat16"))
    for tree in ("bundled", "3", "chain:2"):
        assert not chooses(load(directory, tree=tree))
    assert not chooses(load(directory, "none"))
    with monkeypatch.context() as hosts:
        hosts.setattr(tree_choice.jax, "process_count", lambda: 2)
        assert not tree_choice.steps_choose()
    monkeypatch.setenv(tree_choice.VARIABLE, "bundled")
    assert not chooses(load(directory, "prompt_lookup"))
    assert load(directory).tree.n_nodes == load(directory, weights="int8").tree.n_nodes == 6
    monkeypatch.setenv(tree_choice.VARIABLE, "measured")
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
    timed = {"batch": 1, "nodes": 2}
    for bad in (
        [{"batch": 1}],
        [{"batch": 0, "nodes": 2}],
        7,
        [[1, 2]],
        [timed | {"rows": 7}],
        [timed | {"rows": [{"nodes": 2}]}],
    ):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"batches": bad}))
        with pytest.raises(UserError, match="batches"):
            load(directory, heads)


@pytest.mark.wide
def test_a_conversation_goes_on_after_plain_steps(directory, free, costs):
    """They keep the drafter's keys and values, so nothing is read again."""
    costs += [1.0, 9.0, 9.0]
    model = load(directory, "draft_model:{directory}")
    talk, prompt = Dialogue(model), model.encode(PROMPTS[0])
    for new in ("in", "at"):
        *_, (_, [result]) = talk.stream(prompt, OPTIONS)
        [alone] = model.generate([prompt], OPTIONS, tree="none")
        assert result.token_ids == alone.token_ids and result.tree_nodes == 1
        previous = len(prompt)
        prompt = [*prompt, *result.token_ids, *model.encode(new)[1:]]
    assert talk.reused > previous - 4


@pytest.mark.wide
def test_a_conversation_with_penalties_outgrows_its_cache(directory, monkeypatch):
    for name in ("LEAST_SLOTS", "SMALL", "LARGE"):
        monkeypatch.setattr(dialogue, name, 64)
    model = load(directory, "draft_model:{directory}")
    talk, prompt = Dialogue(model), model.encode(PROMPTS[0])
    options = dataclasses.replace(OPTIONS, max_new_tokens=3, repetition_penalty=1.3)
    for n in (30, 90):
        prompt = (prompt * n)[:n]
        *_, (_, [result]) = talk.stream(prompt, options)
        assert result.token_ids == model.generate([prompt], options)[0].token_ids
    assert talk.reused
