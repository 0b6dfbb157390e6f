"""The launch files: SLURM's run as SLURM runs it, GKE's against what JAX reads there."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from children import devices, environment
from training_setup import ROOT, records, write_config, write_tokens

from medusa_jax import hosts

# Two tasks on this machine, with the variables that srun sets. It passes signals on, here they come to all.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
assert sys.argv[1:3] == ["--kill-on-bad-exit=1", "--cpus-per-task=3"], sys.argv
signal.signal(signal.SIGTERM, lambda *_: None)
told = {{"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1"}}
tasks = [
    subprocess.Popen(
        sys.argv[3:], env=os.environ | told | {{"SLURM_PROCID": i, "SLURM_LOCALID": i}}
    )
    for i in "01"
]
statuses = [task.wait() for task in tasks]
sys.exit(max(status if status >= 0 else 128 - status for status in statuses))
"""
STEPS = 60


def free_job():
    """A job's number from which JAX makes a port that is free."""
    for number in range(os.getpid() % 4096, 4096 * 2):
        with socket.socket() as s:
            try:
                s.bind(("localhost", 2**16 - 2**12 + number % 4096))
            except OSError:
                continue
            return number
    raise AssertionError("no port is free")


@pytest.fixture
def submit(tmp_path):
    """submit(srun, *args): `launch/slurm.sh` as a job of two tasks, and what it asked SLURM for."""
    programs, asked = tmp_path / "programs", tmp_path / "asked"
    asked.touch()

    def start(srun, *args, **more):
        venv = tmp_path / "venv" / "bin"
        scontrol = f'#!/bin/sh\necho "$@" >> {asked}\n'
        for directory, name, text in (
            (programs, "srun", srun),
            (programs, "scontrol", scontrol),
            (venv, "activate", f'PATH="{Path(sys.executable).parent}:$PATH"\n'),
        ):
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
            (directory / name).chmod(0o755)
        job = {
            "SLURM_JOB_ID": str(free_job()),
            "SLURM_NTASKS": "2",
            "SLURM_CPUS_PER_TASK": "3",
        }
        paths = {"PATH": f"{programs}:{os.environ['PATH']}", "VENV": str(tmp_path / "venv")}
        return subprocess.Popen(
            ["bash", str(ROOT / "launch" / "slurm.sh"), *args],
            cwd=ROOT,
            env=environment(devices(2)) | job | paths | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start, asked


@pytest.mark.parametrize("status", [0, 1, 2, hosts.LOST, 128 + signal.SIGTERM, 137])
def test_a_job_goes_back_into_the_queue_where_that_helps(submit, status):
    """Not where it is done, a mistake would come again, or it came back often enough."""
    start, asked = submit
    args = f"#!/bin/sh\nexit {status}\n", "--workdir=somewhere"
    job = start(*args, SLURM_JOB_ID="17")
    said = job.communicate(timeout=60)[0]
    assert job.returncode == status, said
    assert asked.read_text() == ("requeue 17\n" if status > 2 else "")
    asked.write_text("")
    job = start(*args, SLURM_RESTART_COUNT="20")
    job.communicate(timeout=60)
    assert job.returncode == status and not asked.read_text()


@pytest.mark.slow
def test_a_preempted_job_goes_on_to_its_export(submit, tmp_path):
    """Two processes find each other; SIGTERM to all that SLURM started; the same job once more."""
    start, asked = submit
    config = write_config(tmp_path, write_tokens(tmp_path / "tokens"))
    fields = {"train.steps": STEPS, "train.save_every": 1000, "mesh": "1,-1,1"}
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    args = [f"--config={config}", f"--workdir={tmp_path / 'run'}", *flags]

    def steps():
        return [r["step"] for r in records(tmp_path / "run")]

    job = start(SRUN, *args)
    while len(steps()) < 3:
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.02)
    os.killpg(job.pid, signal.SIGTERM)
    said = job.communicate(timeout=900)[0]
    stopped = steps()[-1]
    assert job.returncode == 128 + signal.SIGTERM, said
    assert said.count(f"stopped by SIGTERM after step {stopped};") == 2, said
    assert asked.read_text().startswith("requeue ")
    asked.write_text("")

    job = start(SRUN, *args, SLURM_RESTART_COUNT="1")
    said = job.communicate(timeout=900)[0]
    assert job.returncode == 0 and f"resuming from step {stopped} of {STEPS}" in said, said
    assert steps() == list(range(1, STEPS + 1)) and not asked.read_text()
    assert (tmp_path / "run" / "export" / "model.safetensors").stat().st_size


def test_pods_start_again_by_what_training_ends_with():
    job = list(yaml.safe_load_all((ROOT / "launch" / "gke_tpu.yaml").read_text()))[1]
    pod, rules = job["spec"]["template"]["spec"], job["spec"]["podFailurePolicy"]["rules"]
    container = pod["containers"][0]
    assert pod["restartPolicy"] == "Never"  # else there is no policy
    by_status = {
        status: rule["action"]
        for rule in rules
        if rule.get("onExitCodes", {}).get("containerName") == container["name"]
        for status in rule["onExitCodes"]["values"]
    }
    again = (hosts.LOST, 128 + signal.SIGABRT, 128 + signal.SIGTERM)
    assert by_status == dict.fromkeys((1, 2), "FailJob") | dict.fromkeys(again, "Ignore")
    program, *flags = container["command"][1:]
    assert container["command"][0] == "python" and (ROOT / program).exists()
    config, workdir = (flag.partition("=")[2] for flag in flags)
    assert (ROOT / config).exists()
    assert workdir.startswith(container["volumeMounts"][0]["mountPath"] + "/")
