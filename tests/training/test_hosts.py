"""Several processes as one program: two of them, with four simulated devices each, on this machine."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from children import devices, ended, environment, output_of, two
from closeness import assert_close
from jax.errors import JaxRuntimeError
from training_setup import command, records, write_config

from medusa_jax import hosts
from medusa_jax.devices import launchers
from medusa_jax.errors import UserError

STEPS = 24


@pytest.mark.parametrize(
    ("several", "environment"),
    [
        (False, {}),
        # A shell inside an allocation of 8 tasks is one process; `srun` says which step it is.
        (False, {"SLURM_NTASKS": "8"}),
        (True, {"SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "n[1-2]"}),
        (False, {"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n1"}),
        (True, {"OMPI_COMM_WORLD_SIZE": "2"}),
        (True, {"TPU_WORKER_HOSTNAMES": "a,b"}),
        (False, {"TPU_WORKER_HOSTNAMES": "a"}),
        (True, {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}),
    ],
)
def test_launchers_that_start_several_processes_are_recognised(several, environment):
    assert launchers.launched(environment) == several


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_processes": "2"}, "--coordinator_address is missing"),
        ({"coordinator_address": "a:1", "num_processes": "two"}, "whole"),
    ],
)
def test_flags_that_do_not_say_who_is_who(given, words):
    with pytest.raises(UserError, match=words):
        hosts.join({"process_id": "0"} | given)


def test_a_claim_ends_with_its_process(tmp_path):
    """Another process holds the directory until it is killed."""
    code = (
        "import sys, time; from medusa_jax import hosts\n"
        "with hosts.locked(sys.argv[1]): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="in use by another"), hosts.locked(tmp_path):
        pass
    process.kill()
    process.communicate(timeout=60)
    with hosts.locked(tmp_path):
        pass


def test_a_machine_with_tpus_may_be_alone(monkeypatch, left, capsys):
    """Where the environment says nothing, JAX is asked, and knows of no others, or of late ones."""
    asked = []

    def initialize(*args, heartbeat_timeout_seconds, **numbers):
        asked.append((args, numbers))
        raise answer

    monkeypatch.setattr(hosts.jax.distributed, "initialize", initialize)
    hosts.join({})
    assert not asked  # no launcher, no TPU
    monkeypatch.setattr(launchers, "accelerator", lambda: "tpu")
    for answer in (ValueError("no pod"), ConnectionError("no metadata")):  # noqa: B007
        hosts.join({})
    assert asked == [((None, None, None), {})] * 2
    answer = RuntimeError("nobody answers\nstack")
    hosts.join({})
    assert capsys.readouterr().err.endswith("did not meet: nobody answers\n")
    assert left == [hosts.LOST]
    given = {"coordinator_address": "a:1", "num_processes": "2", "process_id": "1"}
    answer = ValueError("no address")
    with pytest.raises(UserError, match="no address"):
        hosts.join(given)
    assert asked[-1] == (("a:1", 2, 1), {})
    monkeypatch.setenv("TPU_PROCESS_ADDRESSES", "local")  # a notebook's: nobody is asked
    hosts.join({})
    monkeypatch.setattr(launchers, "accelerator", lambda: "")
    for module in (launchers, hosts):
        monkeypatch.setattr(module, "launched", lambda environment: True)
    with pytest.raises(UserError, match="no address"):  # one that was launched is not alone
        hosts.join({})


def logged(workdir, kind="train"):
    """step -> losses."""
    return {r["step"]: (r["loss"], r.get("lm_loss")) for r in records(workdir, kind)}


def both_end_well(*command):
    """What two processes said on stderr."""
    processes = two(*command)
    errors = ended(processes)
    assert [p.returncode for p in processes] == [0, 0], errors
    return errors


def wait_for_step(workdir, step, processes):
    while max(logged(workdir), default=0) < step:
        assert all(p.poll() is None for p in processes), ended(processes)
        time.sleep(0.02)


@pytest.fixture
def arguments(tokens, tmp_path):
    """A run in which backbone and heads train, over all eight devices."""
    fields = {"train.steps": STEPS, "train.save_every": 5, "train.eval_every": 12}
    fields |= {"data.eval_source": tokens, "data.eval_samples": 10, "mesh": "1,-1,1"}
    fields |= {"optim.name": "adamw", "train.accumulation": 2, "train.batch_size": 16}

    def build(workdir, **other):
        given = fields | {name.replace("__", "."): value for name, value in other.items()}
        config = write_config(tmp_path, tokens, "native")
        flags = [f"--config.{name}={value}" for name, value in given.items()]
        return command(f"--config={config}", f"--workdir={workdir}", *flags)

    return build


@pytest.mark.slow
def test_two_processes_train_as_one(arguments, tmp_path):
    """One killed, then one asked to stop, then one process alone: always the same losses."""
    whole, cut, alone = tmp_path / "whole", tmp_path / "cut", tmp_path / "alone"
    both_end_well(*arguments(whole))
    series, held_out = logged(whole), logged(whole, "eval")
    assert sorted(series) == list(range(1, STEPS + 1)) and sorted(held_out) == [12, 24]

    # One is lost: the other ends by itself, with a one-line error if a collective fails, else by JAX's service.
    processes = two(*arguments(cut))
    wait_for_step(cut, 7, processes)
    processes[1].send_signal(signal.SIGKILL)
    errors = ended(processes)
    assert processes[1].returncode == -signal.SIGKILL
    if processes[0].returncode == hosts.LOST:
        last = errors[0].strip().splitlines()[-1]
        assert last.startswith("error: another process of this run is lost"), errors[0]
        assert "resume from the last checkpoint" in last
    else:
        assert processes[0].returncode == -signal.SIGABRT, errors
        assert "stopped sending heartbeats" in errors[0]

    # Both again; SIGTERM to one ends both after the same step.
    processes = two(*arguments(cut))
    wait_for_step(cut, 14, processes)
    processes[1].send_signal(signal.SIGTERM)
    errors = ended(processes)
    assert [p.returncode for p in processes] == [143, 143], errors
    said = [[x for x in e.splitlines() if "stopped by SIGTERM" in x] for e in errors]
    assert said[0] == said[1] and len(said[0]) == 1
    stopped = max(logged(cut))
    assert f"after step {stopped};" in said[0][0]
    assert 14 <= stopped < STEPS and (cut / "checkpoints" / str(stopped)).is_dir()
    assert logged(cut) == {n: series[n] for n in range(1, stopped + 1)}, "not bit for bit"

    # The rest on one process and another mesh, and all of it on one device.
    for workdir, mesh, count in ((cut, "1,2,2", 4), (alone, "1,1,1", 1)):
        args = arguments(workdir, mesh=mesh)
        output_of(*args, command=(), xla_flags=devices(count))
        for kind, expected in (("train", series), ("eval", held_out)):
            mine = logged(workdir, kind)
            assert mine.keys() == expected.keys()
            for n, losses in expected.items():
                for found, wanted in zip(mine[n], losses):
                    np.testing.assert_allclose(found, wanted, rtol=1e-4)
        for name in ("model.safetensors", "heads/heads.safetensors"):
            sizes = [(d / "export" / name).stat().st_size for d in (workdir, whole)]
            assert sizes[0] == sizes[1]


CACHING = """
import sys
from medusa_jax.commands.train import main
from medusa_jax.training.data import features
features.SHARD_BYTES = 30 * 16 * 16 * 4
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_hidden_states_are_computed_by_all_and_written_by_one(arguments, tmp_path):
    """Files that are missing, rows that no number of devices divides; the losses of one process."""
    kept, alone, both = tmp_path / "kept", tmp_path / "alone", tmp_path / "both"
    fields = {"train__stage": "medusa1", "train__steps": 10, "data__packing": "first_fit"}
    fields |= {"data__cache_features": "float32", "data__features_path": kept}
    start = [sys.executable, "-c", CACHING]
    args = [*start, *arguments(alone, mesh="1,1,1", **fields)[2:]]
    output_of(*args, command=(), xla_flags=devices(1))
    expected = {file: np.load(file) for file in kept.glob("*/hidden_*.npy")}
    assert len(expected) > 6
    gone = {*sorted(expected)[1::3], max(expected)}
    for file in gone:
        file.unlink()
    stamps = {file: file.stat().st_mtime_ns for file in expected if file.exists()}
    errors = both_end_well(*start, *arguments(both, **fields)[2:])
    assert "files are there" in errors[0] and "hidden states" not in errors[1]
    assert stamps == {file: file.stat().st_mtime_ns for file in stamps}
    for file in gone:
        assert_close(np.load(file), expected[file])
    for kind in ("train", "eval"):
        found, wanted = logged(both, kind), logged(alone, kind)
        assert found.keys() == wanted.keys()
        for n in wanted:
            np.testing.assert_allclose(found[n][0], wanted[n][0], rtol=1e-4)


PLACED = r"""
import sys
import numpy as np
from medusa_jax import hosts
from medusa_jax.files.fingerprint import sample_bytes
from medusa_jax.sharding import make_mesh, local_rows
from medusa_jax.training.placement import local_numbers, microbatches

hosts.join(dict(a.removeprefix("--").split("=") for a in sys.argv[1:]))
whole = np.arange(16)[:, None] * np.ones((1, 3), int)
for shape, count in {(8, 1, 1): 4, (1, 1, 8): 8, (2, 2, 2): 4, (1, 2, 4): 4}.items():
    mesh = make_mesh(shape)
    own = local_numbers(mesh, 16, 2)
    assert len(own) == 2 * count and len(local_rows(mesh, 8)) == count, (shape, own)
    placed = microbatches(mesh, {"x": whole[own]}, 2)["x"]
    assert placed.shape == (2, 8, 3)
    for shard in placed.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole.reshape(2, 8, 3)[shard.index])
    np.testing.assert_array_equal(hosts.on_host(placed), whole.reshape(2, 8, 3))
    assert sample_bytes(placed, 7) == sample_bytes(whole.reshape(2, 8, 3), 7)
"""


@pytest.mark.slow
def test_each_process_hands_over_the_rows_of_its_devices():
    """Also where the tensor axis spans processes, which then have the same rows."""
    both_end_well(sys.executable, "-c", PLACED)


SILENT = r"""
import sys, time
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from medusa_jax import hosts
from medusa_jax.sharding import make_mesh

hosts.HEARTBEAT = 5
hosts.join(dict(a.removeprefix("--").split("=") for a in sys.argv[1:]))
everywhere = NamedSharding(make_mesh((1, 8, 1)), PartitionSpec("fsdp"))
x = jax.make_array_from_callback((8,), everywhere, lambda i: np.ones(1))
total = jax.jit(lambda x: x.sum())
with hosts.fail_together():
    while True:
        hosts.wait(total(x))
        print("a step", flush=True)
        time.sleep(0.1)
"""


@pytest.mark.slow
def test_a_process_that_is_silent_ends_the_others():
    """A stopped one keeps its connections, as a machine without power does: nothing fails."""
    processes = two(sys.executable, "-c", SILENT)
    try:
        for process in processes:
            assert "a step\n" in iter(process.stdout.readline, ""), process.stderr.read()
        processes[1].send_signal(signal.SIGSTOP)
        said = processes[0].communicate(timeout=300)[1]
    finally:
        for process in processes:
            process.kill()
    assert processes[0].returncode == -signal.SIGABRT, said
    assert "stopped sending heartbeats" in said


@pytest.fixture
def left(monkeypatch):
    """Exit statuses of this process, one of two, instead of its end."""
    statuses = []
    monkeypatch.setattr(hosts.jax, "process_count", lambda: 2)
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


def test_a_step_that_takes_too_long_ends_the_run(left, monkeypatch, capsys):
    """Where another process lives but does not go on."""
    gone = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: (left.append(status), gone.set()))
    monkeypatch.setattr(hosts, "STALLED", 0.05)
    monkeypatch.setattr(hosts.jax, "block_until_ready", lambda _: gone.wait(300))
    hosts.wait(None)
    assert left == [hosts.LOST] and "no step was finished" in capsys.readouterr().err


def test_a_lost_process_ends_this_one_in_a_sentence(left, monkeypatch, capsys):
    """What is raised instead of a hang, and that a normal end, which would wait, is not taken."""
    for error, words in (
        (JaxRuntimeError("Gloo: it closed\nby peer"), "lost (Gloo: it closed)"),
        (ValueError("UNKNOWN: Gloo all-reduce failed"), "lost (UNKNOWN: Gloo all-reduce"),
        (UserError("the disk is full"), "error: the disk is full"),
    ):
        with hosts.fail_together():
            raise error
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    for error in (JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes"), ValueError("a bug")):
        with hosts.fail_together():  # its own doing: with a traceback, and not tried again
            raise error
        said = capsys.readouterr().err
        assert str(error) in said and "error: this process failed" in said
    assert left == [hosts.LOST, hosts.LOST, 2, 1, 1]
    assert not hosts.lost(ValueError("unknown: a word")) and not hosts.lost(None)
    monkeypatch.setattr(hosts.jax, "process_count", lambda: 1)
    with pytest.raises(UserError, match="the disk"), hosts.fail_together():
        raise UserError("the disk is full")
