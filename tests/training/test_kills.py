"""A training run that is killed again and again ends bit for bit as one that was left alone.

MEDUSA_JAX_KILLS=100 python -m pytest -n 0 -s -m slow tests/training/test_kills.py
"""

import collections
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
from children import environment
from training_setup import ROOT, command, write_tokens

# In all, over as many runs from start to end as it takes.
KILLS = int(os.environ.get("MEDUSA_JAX_KILLS", "20"))
SEED = int(os.environ.get("MEDUSA_JAX_KILLS_SEED", "0"))

CONFIG = """
import sys
sys.path.insert(0, {tests!r})
from training_setup import tiny_config
from medusa_jax.training.data import features

features.SHARD_BYTES = 30 * 16 * 16 * 4  # six files


def get_config():
    cfg = tiny_config({data!r}, "medusa1", steps=120, save_every=6, eval_every=15)
    cfg.data.packing, cfg.data.cache_features = "first_fit", "float32"
    cfg.data.eval_source, cfg.data.eval_samples = {data!r}, 16
    return cfg
"""


def lines(workdir):
    log = workdir / "log.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def since(begun, files):
    """Whether one of them is from after a time; what an earlier kill left is older."""
    try:
        return any(file.stat().st_mtime > begun for file in files)
    except FileNotFoundError:  # renamed meanwhile
        return True


def moments(workdir, chance, seconds):
    """Name -> whether it is time to kill, asked again and again."""
    begun, after = time.time(), chance.uniform(0, seconds)
    until = lines(workdir) + chance.randrange(1, 60)
    return {
        "any": lambda: time.time() > begun + after,
        "hidden states": lambda: since(begun, workdir.glob("features/*/*.new")),
        "a step": lambda: lines(workdir) >= until,
        "a save": lambda: since(begun, workdir.glob("checkpoints/*.orbax-checkpoint-tmp*")),
        "an evaluation": lambda: since(begun, workdir.glob("best*")),
        "the export": lambda: since(begun, workdir.glob("export*")),
    }


@pytest.fixture
def start(tmp_path):
    """Start the run, or go on with it: (its process, its workdir, the file of what it says)."""
    data = write_tokens(tmp_path / "tokens")
    config, said = tmp_path / "config.py", tmp_path / "said"
    config.write_text(CONFIG.format(tests=str(ROOT / "tests" / "support"), data=data))
    # Compiled once for all of them.
    own = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    own["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    args = command(f"--config={config}", f"--workdir={tmp_path / 'run'}")

    def process():
        with open(said, "wb") as file:
            started = subprocess.Popen(args, env=environment() | own, stderr=file)
        return started, tmp_path / "run", said

    return process


def result(workdir):
    """The log, the configuration, and all files of the best and the last heads; then none of it."""
    files = [workdir / "log.jsonl", workdir / "config.json"]
    files += [p for name in ("best", "export") for p in (workdir / name).rglob("*")]
    contents = {str(p.relative_to(workdir)): p.read_bytes() for p in files if p.is_file()}
    shutil.rmtree(workdir)
    return contents


@pytest.mark.slow
def test_killed_at_random_moments(start):
    """Any moment, and right after something has begun that takes a few milliseconds."""
    expected: dict[str, bytes] = {}
    seconds = 0.0
    for _ in range(2):  # the first one compiles
        began = time.monotonic()
        process, workdir, said = start()
        assert process.wait(600) == 0, said.read_text()
        seconds = time.monotonic() - began
        before, expected = expected, result(workdir)
    assert before == expected and len(expected) == 6

    chance, runs = random.Random(SEED), 0
    killed: collections.Counter[str] = collections.Counter()
    while killed.total() < KILLS or workdir.exists():
        fresh = not workdir.exists()
        process, workdir, said = start()
        all_of_them = moments(workdir, chance, seconds)
        # Hidden states are written by the first start only.
        when = (
            "hidden states"
            if fresh and chance.random() < 0.5
            else chance.choice([*all_of_them])
        )
        due = all_of_them[when]
        while process.poll() is None and (killed.total() >= KILLS or not due()):
            time.sleep(0.002)
        if process.poll() is None:
            time.sleep(chance.uniform(0, 0.03))
            process.send_signal(signal.SIGKILL)
        status, words = process.wait(), said.read_text()
        assert "damaged" not in words and "Traceback" not in words, words
        if status == -signal.SIGKILL:
            killed[when] += 1
            print(f"{killed.total()}: {when}, {lines(workdir)} lines", flush=True)
        else:
            assert status == 0, words
            assert result(workdir) == expected
            runs += 1
    print(f"{dict(killed)} in {runs} runs of {seconds:.1f} s, each with the same end")
