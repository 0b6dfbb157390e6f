"""Which kernels are chosen for which devices, and that two of them can be compared by an argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from jax.sharding import AbstractDevice, AbstractMesh
from tiny import random_params, tiny_arch, write_model

import medusa_jax
from medusa_jax.errors import UserError
from medusa_jax.kernels.choose import choose_kernels
from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.kernels.cuda import CudaKernels
from medusa_jax.kernels.one_cpu import LayerKernels, PanelKernels
from medusa_jax.kernels.tpu import TpuKernels
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.llama import Llama
from medusa_jax.native import library
from medusa_jax.sharding import AXES, make_mesh

DEVICES = {
    "cpu": ("cpu", "cpu"),
    "cuda": ("NVIDIA H100 80GB HBM3", "gpu"),
    "rocm": ("AMD Instinct MI300X", "gpu"),
    "tpu": ("TPU v5 lite", "tpu"),
}


def mesh_of(platform, n=1):
    """Devices that are not here."""
    kind, name = DEVICES[platform]
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=name)
    return AbstractMesh((n, 1, 1), AXES, abstract_device=device)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    monkeypatch.delenv("MEDUSA_JAX_ATTENTION", raising=False)
    monkeypatch.delenv("MEDUSA_JAX_PRODUCTS", raising=False)


@pytest.mark.parametrize(
    "platform, expected, own",
    [
        ("cpu", CpuKernels(), CpuKernels()),
        ("cuda", CudaKernels(), CudaKernels(cudnn=False)),
        ("rocm", Kernels(), Kernels()),
        ("tpu", TpuKernels(), TpuKernels(attention=False)),
    ],
)
def test_the_devices_and_a_variable_choose(platform, expected, own, monkeypatch):
    """Whatever is here; a mesh in sight counts where none is given."""
    mesh = mesh_of(platform)
    assert choose_kernels(mesh) == choose_kernels(mesh_of(platform, 4)) == expected
    with jax.sharding.use_abstract_mesh(mesh):
        assert choose_kernels() == expected
    monkeypatch.setenv("MEDUSA_JAX_ATTENTION", "own")
    assert choose_kernels(mesh) == own
    assert len({hash(kernels) for kernels in (expected, choose_kernels(mesh))}) in (1, 2)


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_one_cpu_decodes_by_the_native_kernels(monkeypatch):
    mesh = make_mesh()
    assert choose_kernels(mesh, "float32", 32) == LayerKernels()
    assert choose_kernels(mesh, "float32", 6) == PanelKernels()  # no whole vectors
    assert choose_kernels(mesh, "bfloat16", 32) == PanelKernels()
    assert choose_kernels(mesh, "float64", 32) == choose_kernels(mesh) == CpuKernels()
    assert choose_kernels(mesh_of("cpu", 2), "float32", 32) == CpuKernels()
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "plain")
    assert choose_kernels(mesh, "float32", 32) == CpuKernels()
    monkeypatch.setenv("MEDUSA_JAX_PRODUCTS", "tiles")
    with pytest.raises(UserError, match="plain or native, not 'tiles'"):
        choose_kernels(mesh, "float32", 32)
    monkeypatch.setenv("MEDUSA_JAX_ATTENTION", "mine")
    with pytest.raises(UserError, match="own or not set, not 'mine'"):
        choose_kernels(mesh)


@pytest.mark.parametrize("kernels", [CpuKernels(), CudaKernels(), TpuKernels()])
def test_two_kernels_give_the_same_logits(kernels):
    """What a first hour on new hardware compares: the plain forms, and those of a platform."""
    config = tiny_arch(qk_norm=True)
    params = jax.tree.map(jnp.float32, random_params(config, 0))
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 23, (2, 9)))
    positions_BT = jnp.broadcast_to(jnp.arange(9), (2, 9))

    def logits(kernels):
        llama = Llama(config, jnp.float32, kernels=kernels)

        def run(module):
            hidden = module.forward(tokens_BT, positions_BT, jnp.ones_like(tokens_BT))
            return module.lm_head(hidden)

        return llama.apply({"params": params}, method=run)

    assert_close(logits(kernels), logits(Kernels()), roundings=256)


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_a_model_is_loaded_with_the_kernels_that_are_given(tmp_path):
    """`medusa_jax.load(kernels=...)` goes through storage, backbone and heads."""
    write_model(tmp_path, head_dim=32)
    texts = []
    for kernels in (CpuKernels(), Kernels(), LayerKernels()):
        model = medusa_jax.load(
            tmp_path, tmp_path / "heads", kernels=kernels, draft_weights="float32"
        )
        assert model.llama.kernels == kernels and model.storage.panel == kernels.panel
        [result] = model.generate(["the "], medusa_jax.Options(max_new_tokens=8))
        texts.append(result.text)
    assert texts[0] == texts[1] == texts[2]
