"""The decode loop and a training step by the compilers of a TPU and a GPU, where these are installed."""

import importlib.metadata
import json

import pytest
from children import output_of

from medusa_jax.arch import LlamaConfig
from medusa_jax.files.hf_writer import config_to_hf
from research.compiled import warnings
from research.compiled.targets import COMPILERS

pytestmark = pytest.mark.wide

SHAPE = config_to_hf(LlamaConfig(4096, 512, 2, 4, 4, 128, 1024, 2048))
# Two layers, LM head, heads and caches of two rows, all in 16 bits, are 50 MB at most.
MOST_BYTES = 150 * 10**6
TRAIN = """
import dataclasses

from configs import vicuna7b_m1


def get_config():
    cfg = vicuna7b_m1.get_config()
    cfg.model.arch = dataclasses.replace(
        cfg.model.arch, vocab_size=4096, d_model=512, n_layers=4, n_heads=4, n_kv_heads=4, d_ff=1024
    )
    cfg.data.seq_len, cfg.train.batch_size, cfg.train.accumulation = 256, 8, 2
    return cfg
"""
# What these compilers leave: on a GPU one row's products, where it has not been mended, and top-p.
LEFT = {"v5e": set(), "h100": {warnings.ONE_ROW, warnings.ROUNDS}}
# One process, so that libtpu is loaded once; a line for each call.
CHILD = """
import json, sys
from research.compiled.command import main
for call in json.loads(sys.argv[1]):
    if main([*call, "--json"]):
        sys.exit(1)
"""
SMALL = ("--tree", "16", "--context", "200", "--layers", "2")
TPU = [
    *(("--drafter", d) for d in ("medusa", "hydra", "hydrapp", "amphista")),
    ("--drafter", "medusa", "--batch", "2"),
    ("--drafter", "hydra", "--batch", "2", "--acceptance", "sampled", "--top_p", ".9"),
    ("--drafter", "medusa", "--acceptance", "rejection", "--top_p", ".9"),
]
GPU = [
    *(("--drafter", d) for d in ("medusa", "hydra", "hydrapp", "amphista")),
    ("--drafter", "medusa", "--batch", "2", "--acceptance", "sampled", "--top_p", ".9"),
]


def compiled(target, cases, tmp_path):
    """The JSON objects of `research compile` for these flags; skipped without the compiler."""
    packages = COMPILERS["cuda" if target == "h100" else "tpu"]
    if not {d.name for d in importlib.metadata.distributions()} & {*packages}:
        pytest.skip(f"{' or '.join(packages)} is not installed")
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    calls = [["--for", target, "--shape", str(tmp_path), *SMALL, *case] for case in cases]
    return printed(calls)


def printed(calls):
    """What `research compile --json` prints for each of these calls."""
    printed = output_of(CHILD, json.dumps(calls), JAX_DISABLE_MOST_OPTIMIZATIONS="0")
    return [json.loads(line) for line in printed.splitlines()]


def names(found):
    return [line.partition(":")[0] for line in found["warnings"]]


def test_decoding_on_a_tpu(tmp_path):
    for case, found in zip(TPU, compiled("v5e", TPU, tmp_path), strict=True):
        assert names(found) == [], (case, found["warnings"])
        assert found["memory_bytes"] < MOST_BYTES, case
        assert found["target"] == "v5e:2x2" and found["plain"]["cycles"] > 0
        step = found["step"]
        assert sum(step["stages"].values()) == pytest.approx(step["cycles"])
        assert {"draft", "backbone", "attention", "lm_head"} <= step["stages"].keys()
        assert ("sampling" in step["stages"]) == ("--top_p" in case)


def test_a_training_step_on_a_tpu(tmp_path):
    (tmp_path / "small.py").write_text(TRAIN)
    path = str(tmp_path / "small.py")
    compiled("v5e", [], tmp_path)
    [found] = printed([["--for", "v5e:2x4", "--train", path, "--mesh", "1,8,1"]])
    assert found["warnings"] == []
    assert 0 < found["stored_bytes"] < found["memory_bytes"]
    [found] = compiled("v5e", [("--drafter", path)], tmp_path)
    assert found["step"]["stages"]["draft"] > 0


MESHES = """
import json
import jax
jax.config.update("jax_platforms", "cpu")
from research.compiled.targets import find_target
from medusa_jax.sharding import make_mesh
cases = [("v4:2x2x1", (1, -1, 1)), ("v4:2x2x2", (2, -1, 1)), ("v5p:4x4x4", (2, -1, 1))]
meshes = [make_mesh(shape, find_target(name).devices) for name, shape in cases]
print(json.dumps([list(mesh.shape.values()) for mesh in meshes]))
"""


def test_meshes_of_chips_with_two_cores_and_of_a_split_torus(tmp_path):
    compiled("v5e", [], tmp_path)
    found = json.loads(output_of(MESHES).splitlines()[-1])
    assert found == [[1, 4, 1], [2, 4, 1], [2, 32, 1]]


def test_decoding_on_a_gpu(tmp_path):
    cases = compiled("h100", GPU, tmp_path)
    for case, found in zip(GPU, cases, strict=True):
        # Rows of a batch are one scatter, in place, where row by row would be a kernel each.
        assert set(names(found)) <= LEFT["h100"], (case, found["warnings"])
        assert found["memory_bytes"] < MOST_BYTES, case
        assert found["step"]["cycles"] is None and 0 < found["kernels"] < 800
