"""A checkpoint on a mesh: no device and not the host ever holds a parameter that is shared out."""

import json

import pytest
from children import devices, output_of
from tiny import random_params

from medusa_jax.config import LlamaConfig
from medusa_jax.interop import hf_writer

# 84 MB in float32, of which each of eight devices is to hold an eighth or a quarter.
CONFIG = LlamaConfig(
    vocab_size=8192, d_model=512, n_layers=4, n_heads=8, n_kv_heads=8, head_dim=64,
    d_ff=1408, max_position=64,
)  # fmt: skip

WATCHED = r"""
import gc, json, math, sys, tracemalloc

import jax

import medusa_jax
from live import Peak, on_a_device, shard_bytes
from medusa_jax.interop import tensors
from medusa_jax.model import placing

on_host = 0


def host_bytes():
    # What a simulated device holds may be the very memory that was read.
    held = sum(on_a_device(x) * len(x.sharding.device_set) for x in jax.live_arrays())
    return tracemalloc.get_traced_memory()[0] - held


def watched_open(path):
    def watched(t):
        before = []

        def read(index):
            global on_host
            before.append(host_bytes())
            # Parts of this tensor that were read before and have not left the host.
            on_host = max(on_host, (before[-1] - before[0]) / (4 * math.prod(t.shape)))
            return t.read(index)

        return tensors.Tensor(t.file, t.shape, t.dtype, peak.watching(read))

    return {name: watched(t) for name, t in open_file(path).items()}


open_file, tensors.open_safetensors = tensors.open_safetensors, watched_open
prepare = placing._prepared
tracemalloc.start()


def loaded(mesh):
    global on_host, peak
    gc.collect()  # the model on another mesh
    on_host, peak = 0, Peak()
    placing._prepared = peak.watching(prepare)
    mesh = tuple(map(int, mesh.split(",")))
    model = medusa_jax.load(sys.argv[1], drafter="none", mesh=mesh, dtype="float32")
    leaves = jax.tree.leaves(model.variables["backbone"])
    return {
        "share": shard_bytes(leaves) / sum(x.nbytes for x in leaves),
        "most": peak.bytes / shard_bytes(leaves),
        "on host": on_host,
    }


print(json.dumps({mesh: loaded(mesh) for mesh in sys.argv[2:]}))
"""
MESHES = {"1,8,1": 1 / 8, "2,2,2": 1 / 4}


@pytest.mark.wide
def test_no_device_and_not_the_host_holds_a_whole_parameter(tmp_path, monkeypatch):
    """As stored, fused for decoding, or on the way from one to the other."""
    monkeypatch.setattr(hf_writer, "SHARD_BYTES", 20 * 10**6)
    hf_writer.save_backbone(str(tmp_path), CONFIG, random_params(CONFIG, 0), "float32")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    found = json.loads(output_of(WATCHED, tmp_path, *MESHES, xla_flags=devices(8)))
    for mesh, share in MESHES.items():
        seen = found[mesh]
        assert seen["share"] == pytest.approx(share, rel=0.01)
        # Beside its share a device has a layer twice, or the embedding that is being read.
        assert 1 <= seen["most"] < 1.4
        assert seen["on host"] <= share + 0.01  # of the tensor that is read
