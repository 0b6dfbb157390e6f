"""The mesh: where parameters lie, and that decoding over devices gives the same tokens.

What needs several devices runs in one child process with eight simulated CPU devices.
"""

import pytest
from cases import wide
from children import devices, printed_by

from medusa_jax.errors import UserError
from medusa_jax.sharding import make_mesh

CHILD = r"""
import json, sys
import jax, numpy as np
from jax import monitoring
from jax.sharding import NamedSharding, PartitionSpec as P
jax.config.update("jax_numpy_rank_promotion", "raise")
import medusa_jax
from medusa_jax import Options, UserError
from medusa_jax.hlo.collectives import collectives
from medusa_jax.config import HeadsConfig
from medusa_jax.decoding import generation
from medusa_jax.heads.dflash import DSparkConfig
from medusa_jax.model.backbone import Backbone
from medusa_jax.heads.registry import make_drafter
from medusa_jax.files import hf, tensors
from medusa_jax.files.fingerprint import fingerprint
from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.model.llama import Llama, init_params
from medusa_jax.decoding.loop import decode_loop
from medusa_jax.tree.tree import Tree
from medusa_jax.sharding import (
    ROWS, init_sharded, make_mesh, param_shardings, path_string, spec_for,
)
from tiny import tiny_arch

model_dir = sys.argv[1]
report = {"devices": len(jax.devices()), "errors": {}}
report |= {name: {} for name in ("decoded", "streamed", "compiled", "keys")}

# Everything is where the table says, created there or placed there.
config = tiny_arch(vocab_size=24, n_heads=4, n_kv_heads=4, d_ff=24)
wrong = []
for shape in ((1, 2, 4), (2, 2, 2)):
    mesh = make_mesh(shape)
    backbone = init_sharded(mesh, lambda key: init_params(config, key), jax.random.key(0))
    trees = [backbone]
    for heads in (
        HeadsConfig(n_heads=2, lm_head="low_rank", rank=8),
        DSparkConfig(n_heads=2, n_layers=1, markov_rank=8, confidence=True),
    ):
        drafter, frozen = make_drafter(heads, config), Backbone(Llama(config), backbone)
        trees.append(init_sharded(mesh, lambda key: drafter.init(key, frozen), jax.random.key(1)))
    for tree in trees:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            spec = spec_for(path_string(path))
            cut = [d // (mesh.shape[a] if a else 1) for d, a in zip(leaf.shape, spec)]
            cut += leaf.shape[len(cut):]
            sizes = {s.data.shape for s in leaf.addressable_shards}
            if sizes != {tuple(cut)} or len(leaf.addressable_shards) != 8:
                wrong.append([shape, path_string(path), str(sizes), cut])
report["wrong"] = wrong

# A checkpoint: which parts are read, and what it is known by.
read, open_file = [], tensors.open_safetensors


def watched_open(path):
    def watched(name, t):
        def part(index):
            read.append(name)
            return t.read(index)

        return tensors.Tensor(t.file, t.shape, t.dtype, part)

    return {name: watched(name, t) for name, t in open_file(path).items()}


tensors.open_safetensors = watched_open
report["marks"] = [
    fingerprint(*hf.load_backbone(model_dir, make_mesh(shape)))
    for shape in ((1, 1, 1), (2, 2, 2))
]
tensors.open_safetensors = open_file
report["reads"] = read.count("model.layers.0.mlp.up_proj.weight")

jax.config.update("jax_enable_x64", True)  # in which texts agree token for token

# Programs made, those that the compilation cache holds included.
made = []
event = "/jax/core/compile/jaxpr_to_mlir_module_duration"
monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **more: made.append(seconds) if name == event else None
)
# Steps copy, or draft the spares, as the rows of all devices decide.
tree = Tree.from_choices([[0], [1], [0, 0], [-1], [-1, -1]], [[2], [0, 1]])
texts = ["the cat and", "in", "abc", "the", "cab", "a b", "and", "er"]
temperatures = (0, 0, 0.9, 0, 0, 0.7, 0, 0)
everything = [Options(12 + 2 * i, t, seed=2) for i, t in enumerate(temperatures)]
meshes = [tuple(map(int, mesh.split(","))) for mesh in sys.argv[2:]]
for shape in meshes:
    heads = "/few" if shape == (2, 2, 2) else "/heads"  # with a draft vocabulary of 20 of 40
    form = {"tree": tree, "dtype": "float64", "mesh": shape}
    model = medusa_jax.load(model_dir, model_dir + heads, **form)
    if heads == "/few":
        columns = model.variables["heads"]["draft_vocab"]["lm_head"]["kernel"]
        report["columns"] = [columns.shape, columns.addressable_shards[0].data.shape]
    # There the cache grows on its way.
    CpuKernels.least_slots = 16 if shape == (2, 2, 2) and len(meshes) > 2 else 128
    rows = 3 if shape == (1, 8, 1) else 8  # three are not divided, each device has all
    prompts, options = texts[:rows], everything[:rows]
    model.compile(prompts, options)
    before = len(made)
    results = model.generate(prompts, options)
    *_, (_, streamed) = model.stream(prompts, options)
    report["compiled"][str(shape)] = [before, len(made) - before]
    report["decoded"][str(shape)] = [r.token_ids for r in results]
    report["streamed"][str(shape)] = [r.token_ids for r in streamed]
    state, _ = generation.begin(model.engine(sampled=True), model.variables,
                          model.request(prompts, options))
    keys = state.cache.layers[0][0]
    report["keys"][str(shape)] = keys.addressable_shards[0].data.shape[:2]
    kernel = model.variables["backbone"]["layers_0"]["mlp"]["gate_up_proj"]["kernel"]
    shard = kernel.addressable_shards[0].data.shape
    assert kernel.size == np.prod(shard) * shape[1] * shape[2], (kernel.shape, shard)

# What a decode step sends where everything is split over the tensor axis.
tree, wide = Tree.cartesian([4, 3]), model_dir + "/wide"
model = medusa_jax.load(wide, wide + "/heads", tree=tree, dtype="float32", mesh=(1, 1, 8))
engine = model.engine()
state, _ = generation.begin(engine, model.variables, model.request(texts[:2], [Options()] * 2))
program = decode_loop.lower(engine, model.variables, state, np.int32(1)).compile()
in_the_loop = [c for c in collectives(program.as_text()) if c.trips]
report["sent"] = [sum(c.sent for c in in_the_loop), tree.n_nodes]

for name, shape in {"dimension": (1, 1, 5), "count": (3, -1, 1), "many": (1, 4, 4)}.items():
    try:
        medusa_jax.load(model_dir, "none", tree="none", mesh=shape)
        report["errors"][name] = "none"
    except UserError as error:
        report["errors"][name] = str(error)
# Rows that pass a kernel of ones on its diagonal, contracted over the tensor axis.
mesh = make_mesh((2, 2, 2))
split = NamedSharding(mesh, P(ROWS, "tensor"))
kernel = NamedSharding(mesh, spec_for("layers_0/mlp/down_proj/kernel"))
times = jax.jit(lambda x, w: x @ w, in_shardings=(split, kernel), out_shardings=split)
report["passed"] = times(np.arange(4)[:, None] * np.ones((4, 8)), np.eye(8))[:, 0].tolist()

report["rest"] = list(make_mesh((2, -1, 1)).devices.shape)
print(json.dumps(report))
"""


# For decoding, and the rows and heads of a device: eight rows of four heads; three rows where eight devices do not
# divide them.
MESHES = {"1,1,1": [8, 4], "2,2,2": [2, 2], "1,8,1": [3, 4]}


@pytest.fixture(scope="module", params=[2, *wide(3)])
def report(tmp_path_factory, request):
    from tiny import write_heads, write_model

    path = tmp_path_factory.mktemp("model")
    config, params = write_model(path, n_kv_heads=4)
    write_heads(path / "few", config, params, ids=range(1, 40, 2))
    sizes = {"n_layers": 2, "d_model": 64, "n_heads": 8, "n_kv_heads": 8, "d_ff": 64}
    write_model(path / "wide", **sizes)
    meshes = [*MESHES][: request.param]
    found = printed_by(CHILD, path, *meshes, xla_flags=devices(8))
    assert len(found["decoded"]) == len(found["compiled"]) == len(meshes)
    return found


def test_parameters_lie_where_the_table_says(report):
    assert report["devices"] == 8
    assert report["columns"] == [[16, 20], [8, 10]]
    assert report["wrong"] == []


def test_each_part_of_a_checkpoint_is_read_once(report):
    """Whole by one device, then in quarters by eight; the two that hold the same do not read it twice."""
    assert report["reads"] == 1 + 4
    assert report["marks"][0] == report["marks"][1]


def test_decoding_over_devices_gives_the_same_tokens(report):
    """Greedy rows and sampled ones, each to its own limit; over 2 x 2 x 2 devices in a cache that grows."""
    expected = report["decoded"]["(1, 1, 1)"]
    assert len({len(tokens) for tokens in expected}) == 8
    for texts in (report["decoded"], report["streamed"]):
        for shape, tokens in texts.items():
            assert tokens == expected[: len(tokens)], shape


def test_a_generation_compiles_nothing_that_warming_up_did_not(report):
    """The state's shardings are those that the next call of the loop was compiled for."""
    for shape, (warming_up, afterwards) in report["compiled"].items():
        assert warming_up > 0 and afterwards == 0, shape


def test_rows_and_key_value_heads_lie_over_the_devices(report):
    for mesh, held in report["keys"].items():
        assert held == MESHES[mesh.strip("()").replace(" ", "")]


def test_a_decode_step_sends_what_megatron_s_layout_does(report):
    """Two sums of the activations a layer and one for the embedding (Megatron, figure 4)."""
    sent, M = report["sent"]
    layers, rows, width, devices = 2, 2, 64, 8
    assert M == 17
    activations = rows * M * width * 4
    expected = (2 * layers + 1) * activations * 2 * (devices - 1) / devices
    assert expected <= sent < 1.1 * expected


def test_rows_keep_their_places_in_a_product(report):
    """With rows over (data, fsdp), not (fsdp, data), XLA gives 0, 2, 1, 3."""
    assert report["passed"] == [0, 1, 2, 3]


def test_meshes_that_do_not_divide_are_refused_in_one_line(report):
    errors = report["errors"]
    assert all("\n" not in line for line in errors.values())
    for words in ("'tensor' has 5 devices", "dimension 24 of layers_0/self_attn/k_proj"):
        assert words in errors["dimension"]
    assert "3 does not divide the 8 devices" in errors["count"]
    assert "needs 16 devices, this process has 8" in errors["many"]
    assert report["rest"] == [2, 4, 1]


@pytest.mark.parametrize("shape", [(1, 1), (0, 1, 1), (-1, -1, 1)])
def test_shapes_that_are_no_mesh(shape):
    with pytest.raises(UserError, match="data,fsdp,tensor"):
        make_mesh(shape)
