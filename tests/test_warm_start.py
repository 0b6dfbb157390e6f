"""Whole starts of decode.py with caches that are empty, warm, damaged and full: the same text."""

import re
import subprocess
import sys

import pytest
from children import environment

# decode.py, and how many functions JAX has lowered.
COUNTED = """
import runpy, sys
import jax
seen = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: seen.append(name))
sys.argv[1:] = "--prompt import --max_new_tokens 40".split()
try:
    runpy.run_path("decode.py", run_name="__main__")
finally:
    lowered = sum("jaxpr_to_mlir" in name for name in seen)
    print("lowered", lowered, file=sys.stderr)
"""
SETTINGS = ("JAX_COMPILATION_CACHE_DIR", "JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")


@pytest.mark.wide
def test_warm_damaged_and_full_caches(tmp_path):
    env = {k: v for k, v in environment().items() if k not in SETTINGS}
    env |= {"MEDUSA_JAX_PRODUCTS": "native", "XDG_CACHE_HOME": str(tmp_path)}
    texts = []

    def start(**more):
        call = [sys.executable, "-c", COUNTED]
        done = subprocess.run(call, env=env | more, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
        return int(re.findall(r"lowered (\d+)", done.stderr)[-1]), done.stderr

    cold, said = start()
    assert "MB of weights" in said and len(texts[0]) > 50
    warm, said = start()
    assert warm < cold / 4 and "MB of weights" not in said
    for name, damaged in (("packed", b""), ("programs", b"medusa 1" + bytes(200))):
        for file in (tmp_path / "medusa_jax" / name).iterdir():
            file.write_bytes(damaged)
        start()
    assert start()[0] == warm
    start(MEDUSA_JAX_CACHE_LIMIT="0.000001", MEDUSA_JAX_TREES="")
    assert {*texts} == {texts[0]}
