"""What a start does not do: trace layers again and again, import what it does not need."""

import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from children import run
from tiny import random_params, tiny_arch

from medusa_jax.config import HeadsConfig
from medusa_jax.files.layouts.stored_heads import abstract_heads
from medusa_jax.model import convert, llama
from medusa_jax.model.cache import KVCache
from medusa_jax.model.kernels import Kernels

N_LAYERS = 5


@pytest.fixture
def traced(monkeypatch):
    """How often a layer's attention was traced."""
    calls = []
    for name in ("attend_text", "attend_prompt", "attend_tree"):
        real = getattr(Kernels, name)

        def counted(*args, real=real):
            calls.append(real.__name__)
            return real(*args)

        monkeypatch.setattr(Kernels, name, counted)
    return calls


def test_a_program_traces_its_layers_once(traced):
    """The backbone without and with a cache, and its gradient with activations recomputed."""
    config = tiny_arch(n_layers=N_LAYERS, vocab_size=51)  # sizes that no other test traces
    params = {"params": random_params(config, np.random.default_rng(0))}
    del traced[:]
    tokens_BT = jnp.ones((1, 24), jnp.int32)
    model = llama.Llama(config)

    def forward(params, model=model):
        return model.apply(params, tokens_BT, tokens_BT, tokens_BT, method="forward").sum()

    jax.eval_shape(forward, params)
    assert traced == ["attend_text"]
    del traced[:]
    again = llama.Llama(config, remat=True, dtype=jnp.bfloat16)
    jax.eval_shape(jax.grad(lambda p: forward(p, again)), params)
    assert 1 <= len(traced) <= 2
    del traced[:]
    cache = KVCache.zeros(config, 1, 64, jnp.float32)
    start_B = jnp.zeros((1,), jnp.int32)
    jax.eval_shape(
        lambda p: model.apply(p, tokens_BT, cache, start_B, method="read"), params
    )
    assert traced == ["attend_prompt"]


def test_shapes_of_parameters_come_from_one_layer(traced):
    config = tiny_arch(n_layers=N_LAYERS, vocab_size=52)
    shapes = convert.abstract_params(config)
    assert traced == ["attend_text"]
    abstract_heads(HeadsConfig(n_heads=2), config)
    assert traced == ["attend_text"]
    whole = jax.eval_shape(lambda key: llama.init_params(config, key), jax.random.key(0))
    assert shapes == whole and list(shapes) == list(whole)


RUN = "import runpy, sys; sys.argv[1:] = {!r}; runpy.run_path('{}.py', run_name='__main__')"
NOPE = ["--prompt", "a", "--model", "nope"]
# transformers takes half a second; training and pictures have their libraries.
DEAR = "transformers orbax.checkpoint optax grain datasets scipy matplotlib torch"


@pytest.mark.parametrize(
    ("code", "unneeded", "words"),
    [
        ("import medusa_jax.commands.decode_run, medusa_jax.api", DEAR, ""),
        ("import medusa_jax; dir(medusa_jax)", "jax", ""),
        (RUN.format(["--help"], "decode"), "jax", "--show_drafts"),
        (RUN.format(["--help"], "train"), "jax", "--config"),
        (RUN.format(NOPE, "decode"), "jax", "'nope' is not"),
    ],
)
def test_a_start_imports_no_more_than_it_needs(code, unneeded, words):
    """CPU seconds, so that a busy machine plays no part."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    end = f"print([name for name in {unneeded.split()!r} if name in sys.modules])"
    code = f"import atexit, sys; atexit.register(lambda: {end}); {code}"
    done = run(sys.executable, "-c", code)
    assert words in done.stdout + done.stderr and done.stdout.endswith("[]\n"), done
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 0.5 or unneeded == DEAR
