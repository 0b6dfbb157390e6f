"""The warning about an idle accelerator, and freed memory."""

import os
import subprocess
import sys

import jax
import pytest

from medusa_jax.devices.machine import warn_if_accelerator_unused


def test_an_accelerator_that_jax_does_not_use_is_told(monkeypatch, capsys):
    monkeypatch.setattr(os.path, "exists", lambda other: other == "/dev/nvidia0")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    warn_if_accelerator_unused()
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("warning: ") and err.count("\n") == 1
    assert "jax[cuda12]" in err


COUNT_FAULTS = """
import resource
import numpy as np
from medusa_jax.devices.machine import give_memory_back, keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        np.empty(2**26, np.uint8).fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

give_memory_back()
mapped = faults()
keep_memory()
faults()
print(mapped, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_can_be_kept():
    run = [sys.executable, "-c", COUNT_FAULTS]
    mapped, kept = map(int, subprocess.check_output(run, text=True).split())
    assert mapped > 100 and kept < mapped / 10
