"""`scaling`: figures of all layers from those of few; meshes that decoding can lie on."""

import pytest

from medusa_jax.interop.shapes import SHAPES
from research.layers import extrapolated
from research.scaling import mesh_for


def of_layers(n):
    """What a model of n layers may take: some for each layer, some once, some from the third on."""
    sent = {"all-gather": 8.0 * n} | ({"all-reduce": 3.0} if n > 2 else {})
    return {"total_bytes": 5 + 3 * n, "sent_bytes": sent, "stage": "medusa1"}


def test_figures_lie_on_a_line():
    asked = []
    found = extrapolated(lambda n: asked.append(n) or of_layers(n), 32, (2, 3))
    assert asked == [2, 3] and found["total_bytes"] == of_layers(32)["total_bytes"]
    assert found["sent_bytes"] == {"all-gather": 8.0 * 32, "all-reduce": 90.0}
    assert found["stage"] == "medusa1"


def test_all_layers_are_measured_where_that_is_asked():
    asked = []
    found = extrapolated(lambda n: asked.append(n) or of_layers(n), 32, None)
    assert asked == [32] and found == of_layers(32)


@pytest.mark.parametrize("shape", ["llama-7b", "llama-33b", "llama3.1-70b"])
def test_decoding_meshes_divide_what_they_split(shape):
    arch = SHAPES[shape]
    for devices in (1, 8, 64):
        data, fsdp, tensor = mesh_for(arch, devices)
        assert data * fsdp * tensor == devices and fsdp == 1
        for size in (arch.n_heads, arch.n_kv_heads, arch.d_ff, arch.vocab_size):
            assert size % tensor == 0
    # 52 heads: four devices at most.
    assert tensor == (4 if shape == "llama-33b" else 8)
