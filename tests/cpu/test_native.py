"""The native kernels against NumPy, and that a row comes out the same bit for bit in any company."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned, wide
from closeness import assert_close
from planted import drafted, plain_texts, texts_of
from shapes import SHAPES, tiny_shape
from tiny import random_heads, random_params, tiny_arch
from trees import random_tree

from medusa_jax.cpu.layer import norm
from medusa_jax.cpu.layer import rotate as rotate_native
from medusa_jax.cpu.panels import Panels
from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.heads.causal_layer import LayerState
from medusa_jax.heads.draft_model import MODEL
from medusa_jax.heads.drafter import Committed, DraftRequest, Ranked
from medusa_jax.heads.registry import drafter_class, make_drafter
from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.kernels.one_cpu import LayerKernels
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.cache import KVCache
from medusa_jax.model.convert import decoder, prepare, store
from medusa_jax.model.kernels import PLAIN
from medusa_jax.model.llama import Llama
from medusa_jax.model.stored import Storage
from medusa_jax.native import library
from medusa_jax.sharding import make_mesh
from medusa_jax.tree.tree import Tree

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")
# Attention has instances for heads of whole vectors, whatever their width here.
CONFIG = tiny_arch(
    vocab_size=70, d_model=48, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=64, qk_norm=True
)


# Rows that fill the registers and not, and more than take turns; inputs that fill words and not, and of several
# turns; outputs that fill panels and not.
@pytest.mark.parametrize("weights", ["", "bfloat16", "int8"])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 1, 1), (2, 3, 5), (5, 64, 64), (7, 65, 33), (13, 50, 150), (30, 67, 97)]
    + [(50, 601, 33)],
)
def test_a_product_in_panels(rows, inputs, outputs, weights):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    kernel = rng.standard_normal((inputs, outputs)).astype(np.float32)
    some = {0, rows // 2, rows - 1}

    @jax.jit
    def run(x, kernel):
        """The product, the kernel as it is stored without panels, some rows alone."""
        storage = Storage(library().panel, weights)
        [panels] = store({"kernel": kernel}, storage, LayerKernels()).values()
        [plain] = store({"kernel": kernel}, Storage(0, weights)).values()
        got, *alone = (
            LayerKernels().multiply(part, panels, jnp.float32)
            for part in (x, *(x[row : row + 1] for row in some))
        )
        return got, plain, alone

    got, plain, alone = run(x, kernel)
    exact = (
        np.asarray(plain.codes, np.float64) * np.asarray(plain.scales)
        if weights == "int8"
        else plain
    )
    want = np.asarray(x, np.float64) @ np.asarray(exact, np.float64)
    assert_close(got, want, 2048 if weights == "int8" else 64, dtype="float32")
    for row, by_itself in zip(some, alone):
        np.testing.assert_array_equal(by_itself[0], np.asarray(got)[row])


# Widths of the results in panels, from one output short of the last panel to one beyond it.
@pytest.mark.parametrize(
    ("width", "extra", "panels", "form"),
    [(0, 1, 2, "float32"), (1, 0, 2, "float32"), (2, 1, 2, "float32"), (1, 0, 1, "Q4_1")],
)
def test_panels_that_do_not_fit_the_outputs_are_refused(width, extra, panels, form):
    """Fewer outputs than the last panel begins with were written beyond the results' memory."""
    panel = library().panel
    words = jnp.zeros((panels, 5, panel), jnp.uint32)
    with pytest.raises(Exception, match=r"panels, scales or bias .* do not fit"):
        kernel = Panels(words, None, form, 5, width * panel + extra, 16)
        jax.block_until_ready(kernel.product(jnp.ones((2, 5))))


@pytest.mark.parametrize("n", [1, 33])
def test_the_padding_of_a_prompt_is_not_computed(n, model):
    """The first n of 48 tokens have the same bits as alone; the others' states are zeros, and are not cached."""
    llama, params = model
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 70, (1, 48)))
    before = KVCache.zeros(CONFIG, 1, 64, jnp.float32)

    @jax.jit
    def run(tokens_1T, count_1=None):
        args = (tokens_1T, before, jnp.zeros(1, int), count_1)
        return llama.apply({"params": params}, *args, method="read")

    hidden, cache = run(tokens, jnp.array([n]))
    alone, cache_alone = run(tokens[:, :n])
    np.testing.assert_array_equal(hidden[:, :n], alone)
    np.testing.assert_array_equal(hidden[:, n:], 0)
    jax.tree.map(np.testing.assert_array_equal, cache, cache_alone)


# Every option of a layer in one case at least; MLPs that fill panels and not.
@pytest.mark.parametrize(
    ("weights", "options"),
    [
        ("", {"qk_norm": True, "n_kv_heads": 1, "d_ff": 550}),
        ("bfloat16", {"qkv_bias": True, "out_bias": True, "mlp_bias": True}),
        ("int8", {"sliding_window": 7, "n_kv_heads": 4}),
        ("", {"qk_norm": True, "qk_norm_late": True}),
    ],
)
def test_a_layer_in_one_call(weights, options):
    """Against the layer's own modules, by XLA: a tree after texts of two lengths."""
    config = dataclasses.replace(CONFIG, n_layers=1, **{"qk_norm": False, **options})
    tree, start_B = Tree.cartesian([2, 2]), jnp.array([29, 3])
    shape = (2, config.n_kv_heads, 40, config.head_dim)
    rng = np.random.default_rng(0)
    keys, values = jnp.asarray(rng.standard_normal((2, *shape)), jnp.float32)
    cache = KVCache(((keys, values),))
    tokens_BT = rng.integers(0, config.vocab_size, (2, tree.n_nodes))
    nodes = tokens_BT, jnp.asarray(tree.depth_M), jnp.asarray(tree.mask_MM)

    def run(kernels, params):
        storage = Storage(kernels.panel, weights)
        llama = decoder(config, jnp.float32, make_mesh(), storage, kernels)
        params = prepare(params, config, jnp.float32, llama.shards)
        params = store(params, storage, kernels)
        return llama.apply({"params": params}, *nodes, cache, start_B, method="read_tree")

    params = random_params(config, 1)
    native, plain = (
        jax.jit(partial(run, kernels))(params) for kernels in (LayerKernels(), CpuKernels())
    )
    assert_close(native, plain, roundings=8192 if weights == "int8" else 256)


@pytest.mark.parametrize("width", [5, 64, 70])
def test_norm_and_rotation(width):
    rng, f32 = np.random.default_rng(0), partial(jnp.asarray, dtype=jnp.float32)
    x, scale = rng.standard_normal((50, width)), rng.standard_normal(width)
    got = norm(f32(x), f32(scale), 1e-5)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    assert_close(got, want, dtype="float32")
    np.testing.assert_array_equal(norm(f32(x[7]), f32(scale), 1e-5), got[7])
    H = width // 2 * 2
    x, angle = rng.standard_normal((2, 40, 3, H)), rng.standard_normal((2, 40, 1, H))
    turned = f32(x), f32(np.cos(angle)), f32(np.sin(angle))
    assert_close(rotate_native(*turned), PLAIN.rotate(*turned))


def stored_model(config, weights):
    """With kernels in a type that they are stored in; int8 times activations of 16 or 8 bits."""
    params = random_params(config, 0)
    weights, _, bits = weights.partition("/")
    storage = Storage(library().panel, weights, activations=int(bits or 16))
    kernels = LayerKernels()
    llama = decoder(config, jnp.float32, make_mesh(), storage, kernels)
    stored = jax.jit(lambda p: store(prepare(p, config, jnp.float32, 0), storage, kernels))
    return llama, stored(params)


@pytest.fixture(scope="module", params=["", "bfloat16", "int8", *wide("int8/8")])
def model(request):
    return stored_model(CONFIG, request.param)


@pytest.mark.parametrize("shape", thinned(SHAPES, "gemma3"))
def test_layers_of_every_shape(shape):
    """The numbers of XLA's layers, and drafted text bit for bit, with kernels in blocks."""
    config = tiny_shape(shape, vocab_size=70, head_dim=32, d_model=48, d_ff=64)
    plain = store(prepare(random_params(config, 0), config, jnp.float32, 0), Storage(0, ""))
    native = stored_model(config, "")

    @partial(jax.jit, static_argnums=0)
    def run(llama, params, tokens_BT):
        cache = KVCache.zeros(config, 2, 64, jnp.float32)
        args = (tokens_BT, cache, jnp.zeros(2, int))
        hidden, _ = llama.apply({"params": params}, *args, method="read")
        return llama.apply({"params": params}, hidden, method="lm_head")

    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 70, (2, 9)))
    by_xla = native[0].clone(kernels=CpuKernels())
    assert_close(run(*native, tokens), run(by_xla, plain, tokens), roundings=1024)
    request = DecodeRequest([[1, 2, 3], [4], [5, 6, 7, 8, 9]], [40] * 3)
    given = config, (None, *stored_model(config, "int8")), request
    text = plain_texts(*given)
    progress = drafted(*given, text, random_tree(np.random.default_rng(0), 12, 4), 0)
    assert texts_of(progress) == text
    assert np.asarray(progress.histogram_BL)[:, 1:].sum() > 0


def test_every_number_is_that_of_one_token_at_a_time(model):
    """Hidden states, logits and the cache of T tokens in a batch, as a path of a tree and as a piece of a prompt, bit for
    bit, for rows enough that XLA sums up in another order."""
    llama, params = model

    @partial(jax.jit, static_argnums=3)
    def run(tokens_BT, start_B, cache, is_prompt=False):
        T = tokens_BT.shape[1]
        path = () if is_prompt else (jnp.arange(T), jnp.tri(T, dtype=bool))
        args, method = (*path, cache, start_B), "read" if is_prompt else "read_tree"
        hidden, cache = llama.apply({"params": params}, tokens_BT, *args, method=method)
        return hidden, llama.apply({"params": params}, hidden, method="lm_head"), cache

    B, T = 3, 48
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 70, (B, T)))
    empty = KVCache.zeros(CONFIG, B, 64, jnp.float32)
    single, one_by_one = empty, []
    for t in range(T):
        *out, single = run(tokens[:, t : t + 1], jnp.full((B,), t), single)
        one_by_one.append(out)
    for size, is_prompt in ((2, False), (12, False), (24, False), (24, True), (48, True)):
        several = empty
        for t in range(0, T, size):
            part, start_B = tokens[:, t : t + size], jnp.full((B,), t)
            hidden, logits, several = run(part, start_B, several, is_prompt)
            for i in range(size):
                np.testing.assert_array_equal(hidden[:, i], one_by_one[t + i][0][:, 0])
                np.testing.assert_array_equal(logits[:, i], one_by_one[t + i][1][:, 0])
        jax.tree.map(np.testing.assert_array_equal, several, single)


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        *wide(
            ("", "greedy"), ("", "sampled"), ("bfloat16", "sampled"), ("int8/8", "greedy")
        ),
        ("int8", "greedy"),
    ],
    indirect=["model"],
)
def test_texts_are_equal_bit_for_bit(model, rule):
    """With a tree and without, in float32: no mismatch, and none explained. Sampled from all tokens,
    from a nucleus, and through every filter at once."""
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    request = DecodeRequest(prompts, [120] * 3)
    if rule == "sampled":
        filters = {"top_p": [1.0, 0.9, 0.8], "top_k": [0, 0, 30], "min_p": [0.0, 0.0, 0.02]}
        request = DecodeRequest(prompts, [120] * 3, temperature=[1.0] * 3, **filters)
    given = CONFIG, (None, *model), request
    plain = plain_texts(*given, rule)
    tree = random_tree(np.random.default_rng(0), 12, 4)
    progress = drafted(*given, plain, tree, 0, rule)
    assert texts_of(progress) == plain
    assert np.asarray(progress.histogram_BL)[:, 1:].sum() > 0


@pytest.mark.parametrize(
    "name", [*wide("hydrapp", "amphista", "eagle", "eagle3"), "dspark", "draft_model"]
)
def test_layers_of_draft_heads_are_native_calls(name):
    """The states and drafts of XLA's layers, level by level; rows of two lengths."""
    raw = random_params(CONFIG, 0)
    fields = {"amphista": {}, "draft_model": {"arch": CONFIG}}.get(name, {"n_layers": 2})
    heads = drafter_class(name).Config(drafter=name, n_heads=4, **fields)
    drafter = make_drafter(heads, CONFIG)
    given = {}
    if drafter.trained:
        given = random_heads(drafter, Backbone(Llama(CONFIG), raw), 1)
        given = jax.tree.map(jnp.float32, given)
    rng, tree, B, T, E = np.random.default_rng(0), Tree.cartesian([2, 2, 1]), 2, 5, 48
    E *= 1 + len(drafter.taps)
    hidden = rng.standard_normal((3, B, T, E)).astype(np.float32)
    tokens, counts = rng.integers(0, 70, (4, B, T)), ([5, 3], [1, 5], [4, 2])

    def run(kernels):
        storage = Storage(kernels.panel)
        llama = decoder(CONFIG, jnp.float32, make_mesh(), storage, kernels)
        params = prepare(raw, CONFIG, jnp.float32, llama.shards)
        params = store(params, storage, kernels)
        backbone = Backbone(llama, params)
        own = store(given, storage, kernels) if drafter.trained else {MODEL: params}
        # Without room for a block after the text.
        slots = 13 if name == "dspark" else 32
        state, at = drafter.start(B, slots, jnp.float32), np.zeros(B, int)
        for x, here, after, n in zip(hidden, tokens, tokens[1:], counts):
            positions = at[:, None] + np.arange(T)[None]
            new = Committed(x, here, after, positions, jnp.array(n))
            state = drafter.commit(own, backbone, state, new)
            at += n
        rank = lambda depth, logits: Ranked(logits, logits)  # noqa: E731
        request = DraftRequest(jnp.array([3, 4]), tree, rank)
        nodes, ranked = drafter.propose(own, backbone, state, request)
        kept = state.context_BSD if isinstance(state, LayerState) else state.cache
        return nodes, [r.logits for r in ranked], kept

    run = jax.jit(run, static_argnums=0)
    (nodes, *native), (wanted, *plain) = run(LayerKernels()), run(CpuKernels())
    np.testing.assert_array_equal(nodes, wanted)
    assert_close(native, plain, roundings=1024)
    assert "medusa_layer" in run.lower(LayerKernels()).as_text()
