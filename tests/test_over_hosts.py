"""Decoding and self-distillation over several hosts: two processes of four devices, on this machine."""

import json
import signal
import sys
import time

import pytest
from children import devices, ended, output_of, two
from files import write_lines
from tiny import write_model

pytestmark = pytest.mark.slow
TEXTS = ["the cat and", "in", "abc", "the", "cab", "a b", "and", "er"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, n_heads=8, n_kv_heads=8, d_ff=24)
    return directory


def module(*args):
    return [sys.executable, "-m", "medusa_jax", *map(str, args)]


def alone(*args):
    """The same command in one process, which has one device."""
    return output_of(*args, command=(), xla_flags=devices(1))


def results(printed):
    """Lines that are not Gloo's own."""
    return [line for line in printed.splitlines() if not line.startswith("[Gloo]")]


@pytest.mark.parametrize("mesh", ["8,1,1", "1,1,8"])
def test_decoded_tokens_are_those_of_one_device(model, tmp_path, mesh):
    """Rows over all devices, or heads; a stop string, too. Process 0 prints."""
    file = tmp_path / "requests.jsonl"
    lines = [
        {"prompt": text, "max_new_tokens": 12 + 2 * i, "temperature": 0.8 * (i % 2)}
        for i, text in enumerate(TEXTS)
    ]
    lines[3]["stop"] = ["e"]
    write_lines(file, lines)
    args = module(
        "decode", "--model", model, "--drafter", model / "heads", "--tree", "cartesian:3,2",
        "--dtype", "float64", "--prompts_file", file, "--batch_size", 8,
    )  # fmt: skip

    def tokens(printed):
        found = [json.loads(line) for line in results(printed)]
        return [(f["token_ids"], f["finish_reason"], f["steps"]) for f in found]

    processes = two(*args, "--mesh", mesh)
    printed = [process.communicate(timeout=900) for process in processes]
    assert [p.returncode for p in processes] == [0, 0], printed
    assert not results(printed[1][0])
    assert tokens(printed[0][0]) == tokens(alone(*args))


def test_decoding_that_is_stopped_ends_after_a_batch(model, tmp_path):
    """SIGTERM to process 1 alone: both end after the same one, whose answers are there."""
    prompts = ({"prompt": TEXTS[i % 8]} for i in range(400))
    file = write_lines(tmp_path / "requests.jsonl", prompts)
    args = module(
        "decode", "--model", model, "--drafter", "none", "--prompts_file", file,
        "--batch_size", 8, "--max_new_tokens", 60, "--eos_ids", "none", "--mesh", "8,1,1",
    )  # fmt: skip
    processes = two(*args)
    printed = iter(processes[0].stdout.readline, "")
    answers = [next(line for line in printed if line.startswith("{"))]
    processes[1].send_signal(signal.SIGTERM)
    answers += results("".join(printed))
    said = ended(processes)
    assert [p.returncode for p in processes] == [143, 143], said
    n = len(answers)
    assert 8 <= n < 400 and n % 8 == 0
    assert f"stopped by SIGTERM after {n} of 400 requests" in said[0]


def written(out):
    """The files that a distillation leaves, but for the times in its report."""
    names = ("samples.jsonl", "tokens.npy", "counted.npy", "vocab_counts.npy")
    return {name: (out / name).read_bytes() for name in names}


def test_what_is_distilled_is_that_of_one_host(model, tmp_path):
    """One process is sent SIGTERM and both end after the same batch; both again; the same files."""
    prompts = ({"prompt": TEXTS[i % 8] + " ab" * (i // 8)} for i in range(80))
    seeds, out = write_lines(tmp_path / "seeds.jsonl", prompts), tmp_path / "out"
    args = module(
        "distill", "--model", model, "--prompts", seeds, "--batch_size", 8, "--temperature", 0.8,
        "--max_new_tokens", 60, "--dtype", "float64", "--drafter", model / "heads",
        "--tree", "chain:2",
    )  # fmt: skip
    alone(*args, "--out", str(tmp_path / "alone"))
    together = [*args, "--mesh", "4,1,2", "--out", str(out)]
    processes = two(*together)
    samples = out / "samples.jsonl"
    while not samples.exists() or not samples.stat().st_size:
        assert all(p.poll() is None for p in processes), ended(processes)
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGTERM)
    said = ended(processes)
    assert [p.returncode for p in processes] == [143, 143], said
    there = len(samples.read_text().splitlines())
    assert 8 <= there < 80 and there % 8 == 0
    assert f"stopped by SIGTERM after {there} of 80 seeds" in said[0]
    assert not (out / "tokens.npy").exists()
    processes = two(*together)
    said = ended(processes)
    assert [p.returncode for p in processes] == [0, 0], said
    assert f"{there} of 80 seeds were done before" in said[0]
    assert written(out) == written(tmp_path / "alone")
