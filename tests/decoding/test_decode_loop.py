"""The loop and its drivers: where rows end, how the cache grows, what a stream shows."""

import threading
import warnings
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted import (
    check_counts,
    decoded,
    planted,
    planted_params,
    random_model,
    streamed,
    texts_of,
)
from planted import plain_texts as plainly
from tiny import tiny_arch

from medusa_jax import kept_programs, programs
from medusa_jax.decoding import generation
from medusa_jax.decoding.loop import FOREVER, decode_loop
from medusa_jax.decoding.request import DecodeRequest, successive_sizes
from medusa_jax.decoding.state import Engine
from medusa_jax.decoding.stopping import LIMIT, STOPPED
from medusa_jax.heads.registry import no_drafter
from medusa_jax.kept_programs import KeptPrograms
from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.kernels.one_cpu import LayerKernels
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("x64")

VOCAB, ROWS, NEW = 7, 16, 30
# Every step that is not cut short appends four tokens: three drafts and the bonus token.
CHAIN = Tree.chain(3)


CONFIG = tiny_arch(vocab_size=VOCAB)


def request_of(limits, ends=()):
    """Sixteen rows of one prompt that differ only in their request ids."""
    rows = len(limits)
    drawn = {"temperature": [1.5] * rows, "seed": [11] * rows}
    return DecodeRequest([[1, 2, 3]] * rows, limits, [ends] * rows, **drawn)


@cache
def plain_texts():
    """Sixteen different texts, in which every token occurs: else the tests below would show little."""
    texts = plainly(CONFIG, random_model(CONFIG, 1), request_of([NEW] * ROWS), "sampled")
    assert len({tuple(t) for t in texts}) == ROWS
    assert set().union(*texts) == set(range(VOCAB))
    return texts


def all_accepted(tree=CHAIN):
    """An engine and variables whose drafts along the chain are always right."""
    _, llama, backbone = random_model(CONFIG, 1)
    heads = planted_params([[1, 2, 3, *t] for t in plain_texts()], VOCAB, 0)
    heads["pick_BS"][:] = 0.999  # the deepest node
    heads = jax.tree.map(jnp.asarray, heads)
    engine = Engine(llama, planted(CONFIG), tree, "sampled")
    return engine, {"backbone": backbone, "heads": heads}


def cut(text, ends=(), limit=NEW):
    """Plain rule: up to the first end, which is kept, and the limit."""
    for n in range(1, limit + 1):
        if text[n - 1] in ends:
            return text[:n], STOPPED
    return text[:limit], LIMIT


def place(n):
    """Where the n-th token sits: "prefill", 1, 2, 3 for a draft, "bonus"."""
    return "prefill" if n == 1 else ((n - 2) % 4 + 1 if (n - 2) % 4 < 3 else "bonus")


@pytest.mark.parametrize(
    ("ends", "limits", "places"),
    [
        ((0, 3, 5), [NEW] * ROWS, {"prefill", 1, 2, 3, "bonus"}),
        # Limits inside a path, and of one token.
        ((5,), list(range(1, ROWS + 1)), set()),
    ],
)
def test_a_row_ends_at_its_ends_and_its_limit(ends, limits, places):
    engine, variables = all_accepted()
    progress = decoded(engine, variables, request_of(limits, ends))
    expected = [cut(t, ends, limit) for t, limit in zip(plain_texts(), limits)]
    assert texts_of(progress) == [t for t, _ in expected]
    assert np.asarray(progress.status_B).tolist() == [s for _, s in expected]
    check_counts(progress)
    assert {place(len(t)) for t, s in expected if s == STOPPED} >= places
    if limits[0] == 1:
        assert np.asarray(progress.steps_B)[0] == 0


def test_whole_paths_are_accepted_when_every_draft_is_right():
    engine, variables = all_accepted()
    progress = decoded(engine, variables, request_of([1 + 4 * 6] * ROWS))
    assert np.asarray(progress.steps_B).tolist() == [6] * ROWS
    assert np.asarray(progress.histogram_BL).tolist() == [[0, 0, 0, 6]] * ROWS
    assert np.asarray(progress.depth_BO)[0, :9].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_stream_shows_a_growing_prefix_of_what_generate_gives(chunk):
    limits = [NEW - row for row in range(ROWS)]
    engine, variables = all_accepted()
    whole = decoded(engine, variables, request_of(limits, [5]))
    expected = texts_of(whole)
    shown = [[]] * ROWS
    chunks = streamed(engine, variables, request_of(limits, [5]), chunk)
    for n, progress in enumerate(chunks):
        now = texts_of(progress)
        for before, after, final in zip(shown, now, expected):
            assert final[: len(after)] == after and after[: len(before)] == before
        if n == 0:
            assert [len(t) for t in now] == [1] * ROWS
        shown = now
    assert shown == expected
    end = jax.tree.map(np.asarray, progress)
    np.testing.assert_array_equal(end.histogram_BL, whole.histogram_BL)
    np.testing.assert_array_equal(end.steps_B, whole.steps_B)


def test_rows_ended_by_the_caller_stop_and_do_not_disturb_the_others():
    """What a stop string does: the row takes no step beyond the chunk under way."""
    engine, variables = all_accepted()
    expected = plain_texts()
    chunks = streamed(engine, variables, request_of([NEW] * ROWS), 1)
    seen = [next(chunks)]
    wanted = np.arange(ROWS) % 2 == 0
    with pytest.raises(StopIteration):
        while True:
            seen.append(chunks.send(wanted if len(seen) == 3 else None))
    last = texts_of(seen[-1])
    steps = np.asarray(seen[-1].steps_B)
    # Chunk 3 had been sent off when the caller saw chunk 2.
    assert (steps[wanted] == 3).all() and (steps[~wanted] == 8).all()
    for row in range(ROWS):
        assert last[row] == expected[row][: 13 if wanted[row] else NEW]
    assert (np.asarray(seen[-1].status_B)[wanted] == STOPPED).all()
    chunks = streamed(engine, variables, request_of([NEW] * ROWS), 1)
    next(chunks)
    with pytest.raises(StopIteration):  # all of them
        chunks.send(np.ones(ROWS, bool))


def test_the_next_chunk_is_under_way_before_the_last_is_looked_at(monkeypatch):
    """Host work between chunks (stop strings, printing) keeps no row waiting."""
    engine, variables = all_accepted()
    events, true = [], decode_loop

    def sent(*args):
        return events.append("sent") or true(*args)

    monkeypatch.setattr(generation, "decode_loop", sent)
    for _ in streamed(engine, variables, request_of([NEW] * ROWS), 2):
        events.append("looked at")
    assert events == ["sent", "looked at"] * 5


def test_the_cache_grows_under_the_text():
    """A prompt of 100 and 380 tokens more: 128, 256 and 512 slots, batch of two, ragged."""
    _, llama, backbone = random_model(CONFIG, 1)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, 100).tolist(), rng.integers(0, VOCAB, 30).tolist()]
    request = DecodeRequest(prompts, [380, 300], temperature=[1.2, 1.2], seed=[1, 1])
    plain = Engine(llama, planted(CONFIG), Tree.none(), "sampled")
    variables = {"backbone": backbone, "heads": {}}
    # The reference has all slots from the start.
    state, cache_sizes = generation.begin(plain, variables, request)
    assert cache_sizes == [128, 256, 512]
    state = generation.grow(plain, 512, state)
    _, progress = decode_loop(plain, variables, state, np.int32(FOREVER))
    expected = texts_of(progress)
    assert [len(t) for t in expected] == [380, 300]
    tree = Tree.from_choices([[0], [1], [0, 0], [1, 1], [1, 1, 0]])
    engine = Engine(llama, planted(CONFIG), tree, "sampled")
    known = [p + t for p, t in zip(prompts, expected)]
    variables["heads"] = planted_params(known, VOCAB, 0, slots=512)
    progress = decoded(engine, variables, request)
    assert texts_of(progress) == expected
    check_counts(progress)
    assert (np.asarray(progress.histogram_BL) > 10).all()
    *_, last = streamed(engine, variables, request, 16)
    assert texts_of(last) == expected
    np.testing.assert_array_equal(last.histogram_BL, progress.histogram_BL)


def test_the_state_is_donated_and_the_progress_is_not():
    engine, variables = all_accepted()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "some donated buffers were not usable"
        state, _ = generation.begin(engine, variables, request_of([NEW] * ROWS))
        after, progress = decode_loop(engine, variables, state, np.int32(2))
        last, _ = decode_loop(engine, variables, after, np.int32(2))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state, after)))
    kept = jax.tree.leaves((progress, last, variables))
    assert not any(leaf.is_deleted() for leaf in kept)
    assert np.asarray(progress.n_new_B).tolist() == [9] * ROWS


def test_warming_up_compiles_all():
    """It takes no step, and the run after it compiles nothing more."""
    engine, variables = all_accepted()
    request = request_of([NEW] * ROWS, [6])
    programs = (
        decode_loop,
        generation.prefill,
        generation.copied_progress,
        generation.end_rows,
    )
    for program in programs[2:]:  # small ones, which other tests have compiled
        program.clear_cache()
    generation.warm_up(engine, variables, request)()
    before = [program._cache_size() for program in programs]
    progress = decoded(engine, variables, request)
    chunks = streamed(engine, variables, request)
    next(chunks)
    chunks.send(np.arange(ROWS) == 0)
    list(chunks)
    assert before == [program._cache_size() for program in programs]
    assert texts_of(progress) == [cut(t, (6,))[0] for t in plain_texts()]


def test_kept_programs_compile_side_by_side(tmp_path, monkeypatch):
    """All are traced for the shapes of each other's results, and none of them again when they run."""
    _, llama, backbone = random_model(CONFIG, 1)
    llama = llama.clone(dtype=np.dtype("float64"))  # a mark in the file's name
    engine = Engine(llama, no_drafter(CONFIG), Tree.none(), "greedy")
    variables, request = {"backbone": backbone, "heads": {}}, request_of([200] * 2)
    plain = texts_of(decoded(engine, variables, request))
    traced, ran = [], []

    class Store(KeptPrograms):
        def run(self, program, args):
            ran.append(program.__qualname__)
            return super().run(program, args)

    def lowered_for(program, args, lower=kept_programs.lowered_for):
        traced.append(program.__qualname__)
        return lower(program, args)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(programs, "store", store := Store())
    monkeypatch.setattr(kept_programs, "lowered_for", lowered_for)
    prompt_read, prepare_steps = threading.Event(), generation.prepare_steps

    def prepare_after(*args):
        assert prompt_read.wait(60), "the prompt waits for the steps"
        return prepare_steps(*args)

    monkeypatch.setattr(generation, "prepare_steps", prepare_after)
    wait_for_steps = generation.warm_up(engine, variables, request)
    prompt_read.set()
    wait_for_steps()
    ready = [kept.run.done() for kept in store.executables.values()]
    assert all(ready) and set(ran) == {"row_keys"}  # no prompt was read
    assert jax.config.jax_enable_compilation_cache == (kept_programs.blocks == [0])
    loops = 1 + traced.count("grow")
    small = ["copied_progress", "end_rows", "prefill", "row_keys"]
    assert sorted(traced) == sorted(
        [*small, *["decode_loop"] * loops, *["grow"] * (loops - 1)]
    )
    count = len(traced)
    assert texts_of(decoded(engine, variables, request)) == plain
    assert (len(traced), loops) == (count, 2) and jax.config.jax_enable_compilation_cache
    [thread.join() for thread in threading.enumerate() if "_write" in thread.name]
    store.executables.clear()  # a later start
    ran.clear()
    generation.warm_up(engine, variables, request)()
    assert len(traced) == count and ran == ["row_keys"]


def test_trees_of_one_depth_read_prompts_with_one_program():
    engine, variables = all_accepted()
    request = request_of([2] * ROWS)
    generation.begin(engine, variables, request)
    programs = generation.prefill._cache_size()
    wide, _ = all_accepted(Tree.from_choices([[0], [1], [0, 0], [0, 0, 0]]))
    generation.begin(wide, variables, request)
    assert generation.prefill._cache_size() == programs
    deeper, _ = all_accepted(Tree.chain(2))
    generation.begin(deeper, variables, request)
    assert generation.prefill._cache_size() == programs + 1
    copying = Tree.copies(3), Tree.from_choices([[0], *Tree.copies(3).choices])
    one, other = (all_accepted(tree)[0].depth_only for tree in copying)
    assert one == other != engine.depth_only


def test_requests_that_cannot_be_are_refused():
    engine, variables = all_accepted()
    for prompts, limits in (([[]], [3]), ([[1], []], [3, 3]), ([[1]], [0])):
        with pytest.raises(ValueError, match="at least one token"):
            generation.begin(engine, variables, DecodeRequest(prompts, limits))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("longest", "needed", "kernels", "drafter", "expected"),
    [
        (1, 40, CpuKernels(), planted(CONFIG), [128]),
        (120, 130, CpuKernels(), planted(CONFIG), [128, 256]),
        (100, 480, CpuKernels(), planted(CONFIG), [128, 256, 512]),
        (300, 310, CpuKernels(), planted(CONFIG), [512]),
        (1, 40, LayerKernels(), planted(CONFIG), [512]),
        (100, 520, LayerKernels(), planted(CONFIG), [512, 1024]),
        (124, 1, CpuKernels(), planted(CONFIG), [128]),
        (125, 1, CpuKernels(), planted(CONFIG), [256]),
    ],
)
def test_successive_sizes(longest, needed, kernels, drafter, expected):
    engine = Engine(SimpleNamespace(kernels=kernels, taps=()), drafter, CHAIN)
    assert engine.free_slots == 4
    assert successive_sizes(engine, longest, needed) == expected
