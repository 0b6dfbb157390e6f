"""`--tree auto`: trees change while a text is decoded and the text does not; what is learned is kept."""

import dataclasses
import json
import shutil

import pytest
from tiny import write_model

import medusa_jax
from medusa_jax import Options, Tree, UserError
from medusa_jax.api import automatic
from medusa_jax.api.automatic import tokens_by_size, trees_to_try
from medusa_jax.api.dialogue import Dialogue
from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.decoding import adapting
from medusa_jax.decoding import generate as loop
from medusa_jax.decoding.adapting import follows_free
from medusa_jax.decoding.chooser import Chooser, Chunk
from medusa_jax.heads.registry import make_drafter, whole_config

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
    return path


@pytest.fixture
def free(monkeypatch, tmp_path):
    """Trees are automatic, and nothing is known of this device."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(automatic.VARIABLE)
    monkeypatch.setattr(automatic, "AT_FIRST", 0)


def load(directory, drafter="", **more):
    drafter = drafter.format(directory=directory) or str(directory / "heads")
    return medusa_jax.load(str(directory), drafter, **more)


class Cycling(Chooser):
    """Takes every size in turn, two steps of each, with plain ones on a copy and in place."""

    def next(self, ready, most):
        super().next(ready, most)
        self.count = getattr(self, "count", -1) + 1
        sizes = self.learned.sizes
        if not self.learned.returns:
            if self.count % 4 == 1:
                return Chunk(1, 2, apart=True)
            sizes = sizes[1:] if self.count < 12 else [1]
        self.current = sizes[self.count % len(sizes)]
        return Chunk(self.current, 2)


@pytest.mark.parametrize(
    "drafter",
    [
        "",
        "prompt_lookup",
        "lookahead:window=3:ngram=3:guesses=2",
        "draft_model:{directory}",
    ],
)
def test_text_does_not_depend_on_the_sizes(directory, drafter, free, monkeypatch):
    """Greedy and sampled rows together, over a cache that grows; whole texts and streams."""
    monkeypatch.setattr(adapting, "Chooser", Cycling)
    model = load(directory, drafter, dtype="float32")
    rows = [
        dataclasses.replace(OPTIONS, max_new_tokens=150, temperature=t) for t in (0.0, 0.9)
    ]
    plain = [r.token_ids for r in model.generate(PROMPTS, rows, tree="none")]
    found = model.generate(PROMPTS, rows)
    assert [r.token_ids for r in found] == plain
    for result in found:
        assert sum(n * k for k, n in enumerate(result.acceptance_histogram, 1)) == 149
        assert result.tree_nodes and result.steps == sum(result.acceptance_histogram)
    *_, (_, streamed) = model.stream(PROMPTS, rows)
    assert [r.token_ids for r in streamed] == plain


def test_sizes_to_try(directory):
    calibrated = json.loads((directory / "heads" / "tree.json").read_text())
    trees, first = trees_to_try(calibrated, Tree.chain(3), 1, narrow=True)
    assert list(trees) == [3, 4, 6] and first == 3
    assert trees[3] == Tree.from_choices(GROWTH[:2])
    assert trees_to_try(calibrated, Tree.chain(3), 1, narrow=False)[1] == 4
    handmade = {"choices": [[0], [1], [2]], "growth": [[0], [1], [2]]}
    trees, first = trees_to_try(handmade, Tree.chain(3), 1, narrow=True)
    assert list(trees) == [4] and first == 4  # without evidence the user's choice stands
    for default, sizes in ((10, [3, 6, 11]), (4, [3, 5]), (1, [2])):
        trees, first = trees_to_try(None, Tree.chain(default), 1, narrow=False)
        assert list(trees) == sizes and first == min(sizes)
    branched = Tree.from_choices([[0], [1], [0, 0]])
    assert trees_to_try(None, branched, 1, narrow=False) == ({4: branched}, 4)


def test_an_accelerator_may_use_more_than_the_evidence_reaches(monkeypatch):
    growth = [[i] for i in range(70)]
    evidence = {"ladder": [{"nodes": 8, "tokens_per_step": 2.2}]}
    file = {"growth": growth, "evidence": evidence}
    assert tokens_by_size(file) == {1: 1.0, 8: 2.2}
    monkeypatch.setattr(automatic.jax, "default_backend", lambda: "gpu")
    assert tokens_by_size(file) == {1: 1.0, 8: 2.2, 64: 2.2}
    assert tokens_by_size({"growth": growth}) == {}


@pytest.mark.parametrize(
    "name, free", [("medusa", True), ("hydra", True), ("prompt_lookup", True), ("hydrapp", False),
                   ("eagle", False), ("amphista", False), ("draft_model", False)],
)  # fmt: skip
def test_drafters_with_layers_do_not_follow_plain_steps(name, free):
    heads = whole_config(HeadsConfig(drafter=name, lm_head="shared"))
    assert follows_free(make_drafter(heads, LlamaConfig())) == free


def test_with_evidence_the_first_calls_of_a_process_measure_nothing(
    directory, free, monkeypatch
):
    monkeypatch.setattr(automatic, "AT_FIRST", 2)
    for drafter, counts in (("", 2), ("prompt_lookup", 0)):
        model = load(directory, drafter)
        plans = [model.plan(PROMPTS[:1], OPTIONS, None, {})[2].sizes for _ in range(4)]
        assert [sizes is None for sizes in plans] == [i < counts for i in range(4)]


def test_with_evidence_a_measured_step_time_ends_the_changes(directory, free):
    """Then whole texts have one tree; a drafter without a tree file goes on changing."""
    for drafter, settles in (("", True), ("prompt_lookup", False)):
        model = load(directory, drafter)
        sizes = model.plan(PROMPTS[:1], OPTIONS, None, {})[2].sizes
        for figures in sizes.learned.by_size.values():
            figures.ratios.extend([1.2] * 9)
            figures.samples = 9
        _, engine, request = model.plan(PROMPTS[:1], OPTIONS, None, {})
        assert (request.sizes is None) == settles
        if settles:
            [result] = model.generate(PROMPTS[:1], OPTIONS)
            assert result.tree_nodes == engine.tree.n_nodes == model.tree_at(1).n_nodes


def test_what_is_learned_is_kept_and_used_at_the_next_start(directory, free):
    model = load(directory)
    assert model.tree.n_nodes == 4 and model.tree_at(2).n_nodes == 4
    sizes = model.plan(PROMPTS[:1], OPTIONS, None, {})[2].sizes
    sizes.keep()
    assert not model.automatic.cache.file.exists()  # nothing has been measured
    for n, ratio in ((3, 1.25), (4, 2.0), (6, 3.0)):
        sizes.learned.by_size[n].ratios.extend([ratio] * 9)
        sizes.learned.by_size[n].samples = 9
    sizes.learned.by_size[3].add(100, 50, 1)
    assert model.tree_at(1).n_nodes == 3
    sizes.keep()
    again = load(directory, all_heads=False)
    assert again.tree.n_nodes == 3 and again.tree_at(2).n_nodes == 4
    learned = again.automatic.learned(1)
    assert learned.ratio(3) == 1.25 and learned.usual(3) == pytest.approx(2.0)
    # Drafts have lost: this device begins with plain steps.
    sizes.learned.by_size[3].add(10, 500, 0)
    sizes.learned.by_size[3].add(500, 500, 0)
    sizes.keep()
    assert load(directory).tree == Tree.none()
    for damaged in ("{", "[]", '{"1 greedy": {"sizes": {"3": [null, null]}}}'):
        model.automatic.cache.file.write_text(damaged)
        assert load(directory).tree.n_nodes == 4


def test_a_request_writes_the_note(directory, free):
    model = load(directory)
    _, engine, request = model.plan(PROMPTS[:1], OPTIONS, None, {})
    request.sizes.learned.by_size[3].samples = 3
    loop.generate(engine, model.variables_by("greedy"), request)
    ratio, tokens = json.loads(model.automatic.cache.file.read_text())["1 greedy"]["sizes"][
        "3"
    ]
    assert ratio > 1 and tokens >= 1


def test_where_the_tree_stays_the_same(directory, free, monkeypatch):
    """Rules that read drafts, a limit of steps, 16 bits, an explicit tree, several hosts."""
    model = load(directory)

    def adapts(model=model, options=OPTIONS, **more):
        return model.plan(["the"], options, None, more)[2].sizes is not None

    assert adapts() and adapts(tree="auto") and adapts(acceptance="sampled")
    assert not adapts(tree="3") and not adapts(tree="none")
    assert not adapts(acceptance="typical") and not adapts(acceptance="rejection")
    assert not adapts(options=dataclasses.replace(OPTIONS, max_steps=9))
    assert not adapts(load(directory, dtype="bfloat16"))
    assert not adapts(load(directory, tree="bundled"))
    assert not adapts(load(directory, "none"))
    with monkeypatch.context() as hosts:
        hosts.setattr(automatic.jax, "process_count", lambda: 2)
        assert not automatic.is_automatic()
    monkeypatch.setenv(automatic.VARIABLE, "bundled")
    assert not adapts(load(directory)) and load(directory).tree.n_nodes == 4
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
        with pytest.raises(UserError, match="'batch' and 'nodes'"):
            load(directory, heads)


def test_a_conversation_reads_again_what_plain_steps_left_to_the_drafter(
    directory, free, monkeypatch
):
    monkeypatch.setattr(adapting, "Chooser", Cycling)
    model = load(directory, "draft_model:{directory}")
    talk, prompt = Dialogue(model), model.encode(PROMPTS[0])
    for new in ("in", "at"):
        *_, (_, [result]) = talk.stream(prompt, OPTIONS)
        [alone] = model.generate([prompt], OPTIONS, tree="none")
        assert result.token_ids == alone.token_ids
        left = talk.followed
        prompt = [*prompt, *result.token_ids, *model.encode(new)[1:]]
    assert left is not None and talk.reused < len(prompt) - 2


def test_programs_that_cannot_be_compiled_are_not_used(directory, free, monkeypatch):
    def fails(*_):
        raise MemoryError

    monkeypatch.setattr(adapting, "COMPILED", adapting.Compiled())
    monkeypatch.setattr(adapting, "compile_loop", fails)
    model = load(directory, "prompt_lookup")
    for _ in range(3):
        [result] = model.generate(PROMPTS[:1], OPTIONS)
    assert set(result.acceptance_histogram[3:]) == {0}
