"""`--tree auto`: the fastest size by steps measured here, kept, down to plain decoding."""

import json
import os
import shutil
import signal
import threading
import time

import pytest
from tiny import write_model

import medusa_jax
from medusa_jax import Options, Tree, UserError
from medusa_jax.api import device_tree
from medusa_jax.api.device_tree import fastest, figures, trees_by_rows
from medusa_jax.commands import calibrate
from medusa_jax.serving import row_sizes

GROWTH = [[0], [0, 0], [1], [0, 1], [2], [1, 0], [3]]
LADDER = {1: 1.0, 2: 1.5, 3: 1.9, 4: 2.0, 6: 2.1, 8: 2.2}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    ladder = [{"nodes": n, "tokens_per_step": t} for n, t in LADDER.items()]
    file = {"choices": GROWTH[:1], "growth": GROWTH, "evidence": {"ladder": ladder}}
    (path / "heads" / "tree.json").write_text(json.dumps(file))
    return path


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine where a step with n nodes takes `cost[n]`; tells what was measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(device_tree.VARIABLE)
    cost, measured = dict.fromkeys(LADDER, 1.0), []

    class Clock:
        n_steps = 1

        def __init__(self, engines, variables, prompt, *, batch, n_steps):
            self.batch = batch

        def seconds(self, engine):
            nodes = engine.tree.n_nodes
            if (nodes, self.batch) not in measured:
                measured.append((nodes, self.batch))
            return 0.1 * (cost[nodes]() if callable(cost[nodes]) else cost[nodes])

    monkeypatch.setattr(device_tree, "StepClock", Clock)
    return cost, measured


def load(directory, **more):
    return medusa_jax.load(str(directory), str(directory / "heads"), **more)


def test_the_most_tokens_per_second_win_and_are_kept(directory, machine, capsys):
    cost, measured = machine
    cost |= {4: 1.3, 6: 1.9, 8: 2.5}
    assert load(directory).tree.n_nodes == 3  # 1.9 tokens in a step as long as plain
    # The file's choice, then those next to the fastest so far, two on each side.
    assert measured == [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1)]
    line = "measuring which tree is fastest for batch 1, once, at most 3.5 s ..."
    assert capsys.readouterr().err.splitlines() == [line]
    del measured[:]
    assert load(directory, all_heads=False).tree.n_nodes == 3
    assert not measured and not capsys.readouterr().err  # kept
    load(directory, batch=4)
    assert measured and {batch for _, batch in measured} == {4}


def test_latency_only_measures_again(directory, machine, capsys):
    cost, measured = machine
    assert load(directory).tree.n_nodes == 8
    cost |= {4: 1.3, 6: 1.9, 8: 2.5}
    asked = ["--latency_only", "--batches=1", f"--model={directory}"]
    assert calibrate.main([*asked, f"--drafter={directory}/heads"]) == 0
    assert "--tree auto uses 3 nodes at batch 1 from now on" in capsys.readouterr().err
    del measured[:]
    assert load(directory).tree.n_nodes == 3 and not measured


@pytest.fixture
def stuck(machine, monkeypatch):
    """A machine that is so busy that the first program is compiled for ever; it may be let go."""
    cost, measured = machine
    free = threading.Event()
    cost[1] = lambda: free.wait(60)
    yield free, measured
    free.set()


def test_what_was_not_measured_in_time_is_measured_at_the_next_start(
    directory, stuck, machine, monkeypatch
):
    """The programs that were compiled meanwhile are kept on disk."""
    free, _ = stuck
    cost, measured = machine
    monkeypatch.setattr(device_tree, "TREES", 0.1)
    assert load(directory).tree.n_nodes == 2
    free.set()
    cost |= {1: 1.0, 4: 1.3, 6: 1.9, 8: 2.5}
    monkeypatch.setattr(device_tree, "TREES", 3.5)
    assert load(directory).tree.n_nodes == 3
    del measured[:]
    assert load(directory).tree.n_nodes == 3 and not measured


@pytest.mark.parametrize("weights, first", [("int8", 3), ("float32", 8)])
def test_small_trees_are_measured_first_where_weights_are_narrow(
    directory, stuck, monkeypatch, weights, first
):
    monkeypatch.setenv(device_tree.VARIABLE, "bundled")
    model = load(directory, weights=weights)
    monkeypatch.delenv(device_tree.VARIABLE)
    calibrated = {**model.calibrated, "choices": GROWTH}
    assert device_tree.measure_rung(model, calibrated, 1, 0.1)["nodes"] == first
    free, measured = stuck
    free.set()
    device_tree.measure_rung(model, calibrated, 1)
    assert measured[:2] == [(1, 1), (first, 1)]


def test_what_was_timed_in_time_decides(directory, machine, monkeypatch):
    """The third size is compiled for ever: the faster of two is taken."""
    cost, measured = machine
    free = threading.Event()
    cost[4] = lambda: free.wait(60)
    monkeypatch.setattr(device_tree, "TREES", 2.0)
    assert load(directory).tree.n_nodes == 3
    free.set()
    assert measured[-1] == (4, 1)


def test_ctrl_c_ends_measuring_and_keeps_nothing(directory, machine, monkeypatch):
    cost, measured = machine
    free = threading.Event()

    def interrupted():
        """What the measuring thread does: Ctrl-C comes while the caller waits for it.

        Again after 5 s: an interrupt within a callback of the garbage collector is lost.
        """
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        while not free.wait(5):
            os.kill(os.getpid(), signal.SIGINT)
        return 1.0

    cost[1] = interrupted
    monkeypatch.setattr(device_tree, "TREES", 60.0)
    begun = time.monotonic()
    # A run in the background of a script is started with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            load(directory)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 30
    free.set()
    cost[1] = 1.0
    del measured[:]
    monkeypatch.setattr(device_tree, "TREES", 3.5)
    assert load(directory).tree.n_nodes == 8 and measured


def test_many_numbers_of_rows_share_the_time(directory, stuck, monkeypatch):
    """What was not measured in time is the file's choice, kept after some starts."""
    _, measured = stuck
    monkeypatch.setenv(device_tree.VARIABLE, "bundled")
    model = load(directory)
    monkeypatch.delenv(device_tree.VARIABLE)
    monkeypatch.setattr(device_tree, "TREES", 0.1)
    for _ in range(device_tree.TRIES + 1):
        trees = trees_by_rows(model, row_sizes(4), True)
        assert {rows: tree.n_nodes for rows, tree in trees.items()} == {1: 2, 2: 2, 4: 2}
    assert measured == [(1, 1)]


def test_figures_are_of_the_quieter_half_of_the_rounds():
    """Ratios 1.0, 1.1, ..., 1.4 in it, 3 in the others."""
    quiet = [(2, 1 + 0.1 * i, 1.0) for i in range(5)]
    timed = [*quiet, *[(2, 27.0, 9.0)] * 5, (3, 1.0, 1.0)]
    [row] = figures(timed, {2: 1.8, 3: 2.0})  # 3 nodes were timed once
    assert row["step_latency_ratio"] == 1.2 and row["speedup"] == 1.5
    assert row["spread"] == pytest.approx(0.2 / 1.2, abs=1e-4)


def test_a_larger_size_must_be_faster_by_more_than_the_margin():
    def rows(**speedups):
        return [
            {"nodes": int(nodes[1:]), "speedup": speedup, "step_latency_ratio": 1.0}
            for nodes, speedup in speedups.items()
        ]

    assert fastest(rows(n2=2.0, n4=2.03)) == 2
    assert fastest(rows(n2=2.0, n4=2.05)) == 4
    assert fastest(rows(n2=1.01)) == 1 and fastest([]) == 1


def test_a_batch_takes_its_own_rung(directory, machine):
    """What is known on this device, else what the tree file says, else what was loaded for."""
    cost, measured = machine
    cost |= {4: 1.3, 6: 1.9, 8: 2.5}
    model = load(directory)
    assert [model.tree_at(rows).n_nodes for rows in (1, 2, 16)] == [3, 3, 3]
    cost |= {2: 1.6, 3: 2.0, 4: 2.5}
    load(directory, batch=4)
    del measured[:]
    model = load(directory, batch=4, all_heads=False)  # the rung of one row needs two heads
    assert [model.tree_at(rows).n_nodes for rows in (1, 2, 4, 16)] == [3, 1, 1, 1]
    assert not measured and model.tree == Tree.none()
    made = [len(model.generate([[4]] * n, Options(max_new_tokens=2))) for n in (1, 4)]
    assert made == [1, 4]


def test_rungs_of_the_tree_file(directory, machine, tmp_path, monkeypatch):
    shutil.copytree(directory / "heads", tmp_path / "heads")
    file = tmp_path / "heads" / "tree.json"
    rungs = [{"batch": 1, "nodes": 4}, {"batch": 4, "nodes": 2}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"batches": rungs}))
    heads = str(tmp_path / "heads")
    model = medusa_jax.load(str(directory), heads, tree="bundled")
    assert [model.tree_at(rows).n_nodes for rows in (1, 2, 4, 9)] == [4, 2, 2, 2]
    assert model.tree.n_nodes == 4
    ran = []
    engine = model.engine
    monkeypatch.setattr(
        model, "engine", lambda tree, **how: ran.append(tree) or engine(tree, **how)
    )
    model.generate([[4], [5]], Options(max_new_tokens=2))
    assert ran == [model.tree_at(2)]
    # Measured here at one row, the file's elsewhere; what is asked for holds for any number.
    model = medusa_jax.load(str(directory), heads)
    assert [model.tree_at(rows).n_nodes for rows in (1, 4)] == [8, 2]
    model = medusa_jax.load(str(directory), heads, tree="3")
    assert [model.tree_at(rows).n_nodes for rows in (1, 4)] == [3, 3]
    for bad in ([{"batch": 1}], [{"batch": 0, "nodes": 2}], 7, [[1, 2]]):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"batches": bad}))
        with pytest.raises(UserError, match="'batch' and 'nodes'"):
            medusa_jax.load(str(directory), heads)


def test_bundled_is_the_files_own_choice(directory, machine, monkeypatch):
    _, measured = machine
    assert load(directory, tree="bundled").tree.n_nodes == 2
    monkeypatch.setenv(device_tree.VARIABLE, "bundled")
    assert load(directory).tree.n_nodes == 2 and not measured
    monkeypatch.setenv(device_tree.VARIABLE, "measured")
    with pytest.raises(UserError, match="is bundled or not set, not 'measured'"):
        load(directory)


def test_several_hosts_measure_nothing(directory, monkeypatch):
    """Each would find another tree, and their programs would not go together."""
    calibrated = json.loads((directory / "heads" / "tree.json").read_text())
    monkeypatch.delenv(device_tree.VARIABLE)
    assert device_tree.is_measured(calibrated)
    monkeypatch.setattr(device_tree.jax, "process_count", lambda: 2)
    assert not device_tree.is_measured(calibrated)


def test_an_accelerator_may_take_more_than_the_evidence_reaches(monkeypatch):
    growth = [[i] for i in range(70)]
    file = {
        "growth": growth,
        "evidence": {"ladder": [{"nodes": 8, "tokens_per_step": 2.2}]},
    }
    assert device_tree.tokens_by_size(file) == {1: 1.0, 8: 2.2}
    monkeypatch.setattr(device_tree.jax, "default_backend", lambda: "gpu")
    assert device_tree.tokens_by_size(file) == {1: 1.0, 8: 2.2, 64: 2.2}
    assert device_tree.tokens_by_size({"growth": growth}) == {}


@pytest.mark.wide
def test_steps_are_really_timed(directory, monkeypatch, tmp_path):
    model = load(directory, tree="none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = device_tree.measure_rung(model, model.calibrated, 1)
    assert found["rows"] and all(row["step_latency_ratio"] > 0 for row in found["rows"])
    marks = model.config, model.drafter.heads, model.dtype, model.storage, model.mesh
    kept = device_tree.kept_choices(model.calibrated, *marks)
    for content in (None, {"1": {"nodes": 99}}, {"1": 7}, [], "{"):
        if content is not None:
            kept.file.write_text(content if content == "{" else json.dumps(content))
        trees = device_tree.kept_trees(model.calibrated, *marks)
        nodes = {rows: tree.n_nodes for rows, tree in trees.items()}
        assert nodes == ({1: found["nodes"]} if content is None else {})
