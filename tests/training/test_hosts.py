"""Several processes as one program: two of them, with four simulated devices each, on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from children import devices, environment
from jax.errors import JaxRuntimeError
from training_setup import command, write_config

from medusa_jax import hosts
from medusa_jax.errors import UserError

STEPS = 40


def test_launchers_that_start_several_processes_are_recognised():
    assert not hosts.launched({})
    # A shell inside an allocation of 8 tasks is one process; `srun` says which step it is.
    assert not hosts.launched({"SLURM_NTASKS": "8"})
    assert hosts.launched({"SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "n[1-2]"})
    assert not hosts.launched({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n1"})
    assert hosts.launched({"OMPI_COMM_WORLD_SIZE": "2"})
    assert hosts.launched({"TPU_WORKER_HOSTNAMES": "a,b"})
    assert not hosts.launched({"TPU_WORKER_HOSTNAMES": "a"})
    assert hosts.launched({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"process_id": "0", "num_processes": "2"}, "--coordinator_address is missing"),
        (
            {"coordinator_address": "a:1", "num_processes": "two", "process_id": "0"},
            "whole",
        ),
    ],
)
def test_flags_that_do_not_say_who_is_who(given, words):
    with pytest.raises(UserError, match=words):
        hosts.join(given)


def test_a_machine_with_tpus_may_be_alone(tmp_path, monkeypatch):
    """There the environment says nothing: JAX is asked, and knows of no others, or of a fault."""
    asked, answer = [], ValueError("no pod")

    def initialize(*args, **numbers):
        asked.append((args, numbers))
        raise answer

    monkeypatch.setattr(hosts.jax.distributed, "initialize", initialize)
    hosts.join({})
    assert not asked  # no launcher, no TPU
    monkeypatch.setattr(hosts, "TPU_DEVICES", (str(tmp_path),))
    hosts.join({})
    assert asked == [((None,), {})]
    answer = RuntimeError("nobody answers\nstack")
    with pytest.raises(UserError, match=r"did not meet: nobody answers$"):
        hosts.join({})
    given = {"coordinator_address": "a:1", "num_processes": "2", "process_id": "1"}
    answer = ValueError("no address")
    with pytest.raises(UserError, match="no address"):
        hosts.join(given)
    assert asked[-1] == (("a:1",), {"num_processes": 2, "process_id": 1})
    monkeypatch.setattr(hosts, "TPU_DEVICES", ())
    monkeypatch.setattr(hosts, "launched", lambda environment: True)
    with pytest.raises(UserError, match="no address"):  # one that was launched is not alone
        hosts.join({})


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def two(*args):
    """The same command in two processes, each with four devices."""
    flags = [f"--coordinator_address=localhost:{free_port()}", "--num_processes=2"]
    return [
        subprocess.Popen(
            [*args, *flags, f"--process_id={i}"],
            env=environment(devices(4)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]


def ended(processes):
    """What both wrote to stderr, once they have ended."""
    return [process.communicate(timeout=900)[1] for process in processes]


def logged(workdir, kind="train"):
    """step -> losses."""
    path = workdir / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {r["step"]: (r["loss"], r["lm_loss"]) for r in records if r["kind"] == kind}


def wait_for_step(workdir, step, processes):
    while max(logged(workdir), default=0) < step:
        assert all(p.poll() is None for p in processes), ended(processes)
        time.sleep(0.02)


@pytest.fixture
def arguments(tokens, tmp_path):
    """A run in which backbone and heads train, over all eight devices."""
    fields = {"train.steps": STEPS, "train.save_every": 5, "train.eval_every": 20}
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
    processes = two(*arguments(whole))
    errors = ended(processes)
    assert [p.returncode for p in processes] == [0, 0], errors
    series, held_out = logged(whole), logged(whole, "eval")
    assert sorted(series) == list(range(1, STEPS + 1)) and sorted(held_out) == [20, 40]

    # One is lost: the other ends by itself, in a sentence.
    processes = two(*arguments(cut))
    wait_for_step(cut, 7, processes)
    processes[1].send_signal(signal.SIGKILL)
    errors = ended(processes)
    assert [p.returncode for p in processes] == [hosts.LOST, -signal.SIGKILL], errors
    last = errors[0].strip().splitlines()[-1]
    assert last.startswith("error: another process of this run is lost"), errors[0][-3000:]
    assert "go on from the last complete checkpoint" in last

    # Both again; SIGTERM to one ends both after the same step.
    processes = two(*arguments(cut))
    wait_for_step(cut, 14, processes)
    processes[1].send_signal(signal.SIGTERM)
    errors = ended(processes)
    assert [p.returncode for p in processes] == [0, 0], errors
    said = [[x for x in e.splitlines() if "stopped by SIGTERM" in x] for e in errors]
    assert said[0] == said[1] and len(said[0]) == 1
    stopped = max(logged(cut))
    assert f"after step {stopped};" in said[0][0]
    assert 14 <= stopped < STEPS and (cut / "checkpoints" / str(stopped)).is_dir()
    assert logged(cut) == {n: series[n] for n in range(1, stopped + 1)}, "not bit for bit"

    # The rest on one process and another mesh, and all of it on one device.
    for workdir, mesh, count in ((cut, "1,2,2", 4), (alone, "1,1,1", 1)):
        args = arguments(workdir, mesh=mesh)
        env = environment(devices(count))
        done = subprocess.run(args, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        for kind, expected in (("train", series), ("eval", held_out)):
            mine = logged(workdir, kind)
            assert mine.keys() == expected.keys()
            for n, losses in expected.items():
                for found, wanted in zip(mine[n], losses):
                    np.testing.assert_allclose(found, wanted, rtol=1e-4)
        for name in ("model.safetensors", "heads/heads.safetensors"):
            assert (workdir / "export" / name).stat().st_size == (
                (whole / "export" / name).stat().st_size
            )


PLACED = r"""
import sys
import numpy as np
from medusa_jax import hosts
from medusa_jax.sharding import make_mesh, own_rows
from medusa_jax.training.step import microbatches, own_numbers

hosts.join(dict(a.removeprefix("--").split("=") for a in sys.argv[1:]))
whole = np.arange(16)[:, None] * np.ones((1, 3), int)
for shape, count in {(8, 1, 1): 4, (1, 1, 8): 8, (2, 2, 2): 4, (1, 2, 4): 4}.items():
    mesh = make_mesh(shape)
    own = own_numbers(mesh, 16, 2)
    assert len(own) == 2 * count and len(own_rows(mesh, 8)) == count, (shape, own)
    placed = microbatches(mesh, {"x": whole[own]}, 2)["x"]
    assert placed.shape == (2, 8, 3)
    for shard in placed.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole.reshape(2, 8, 3)[shard.index])
    np.testing.assert_array_equal(hosts.on_host(placed), whole.reshape(2, 8, 3))
"""


@pytest.mark.slow
def test_each_process_hands_over_the_rows_of_its_devices():
    """Also where the tensor axis lies across processes, which then have the same rows."""
    processes = two(sys.executable, "-c", PLACED)
    errors = ended(processes)
    assert [p.returncode for p in processes] == [0, 0], errors


def test_a_lost_process_ends_this_one_in_a_sentence(monkeypatch, capsys):
    """What is raised instead of a hang, and that a normal end, which would wait, is not taken."""
    left = []
    monkeypatch.setattr(hosts.jax, "process_count", lambda: 2)
    monkeypatch.setattr(os, "_exit", left.append)
    for error, words in (
        (
            JaxRuntimeError("Gloo: connection closed\nby peer"),
            "lost (Gloo: connection closed)",
        ),
        (UserError("the disk is full"), "error: the disk is full"),
    ):
        with hosts.together():
            raise error
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    for error in (JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes"), ValueError("a bug")):
        with hosts.together():  # its own doing: with a traceback, and not to be tried again
            raise error
        said = capsys.readouterr().err
        assert str(error) in said and "error: this process failed" in said
    assert left == [hosts.LOST, 2, 1, 1]
    monkeypatch.setattr(hosts.jax, "process_count", lambda: 1)
    with pytest.raises(UserError, match="the disk"), hosts.together():
        raise UserError("the disk is full")
