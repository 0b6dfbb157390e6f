"""A low-rank adapter of every kernel of the draft heads, trained on a few windows of text a step."""

from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from medusa_jax.api import Model
from medusa_jax.config import LoraConfig, TrainConfig
from medusa_jax.errors import UserError, first_line
from medusa_jax.evaluate.texts import Text
from medusa_jax.heads.optional import SupportsLevels, has_confidence
from medusa_jax.heads.vocabulary import GROUP
from medusa_jax.learning import moments
from medusa_jax.learning.windows import Window
from medusa_jax.model import lora
from medusa_jax.model.convert import decoding_config, place_head
from medusa_jax.model.layers import with_adapter
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import Params
from medusa_jax.training.functions import HeadFunctions

# Rank of the adapter; learning rate of Adam, and steps to reach it.
RANK, RATE, WARM_UP = 8, 1e-3, 10
LORA = LoraConfig(RANK)
# Steps after each answer. A step learns from this many windows of answers, and from as many of rehearsal; it first reads
# this many further texts to rehearse.
STEPS, WINDOWS, REHEARSED = 3, 4, 2
# Weight, in the loss, of the estimated loss on all rehearsed texts (`moments.py`).
REMEMBERED = 3.0
# Largest decay of the running mean of the trained factors, which forgets less than the newest factors.
MEAN = 0.98
# Learned positions whose logits exist at a time.
CHUNK = 32
# The entry of a kernel's parameters with its factors, in the loss. If they were merged into the kernel, its full gradient
# would be computed first.
ENTRY = "adapter"
# LEVELS: of drafts in the loss, if they share their layers. With one, the deeper levels lose twice as much on other
# text (research/log/2026-11_smollm2.md). TERMS: weights of the loss that the heads' recipe gives.
LEVELS = 2
TERMS = ("label_weight", "teacher_weight", "feature_weight", "lambda_decay")


class Adapter:
    """The adapter of a model's heads, and its steps.

    Attributes:
      heads: the heads without it, in float32.
      factors: low-rank factors for every kernel, whose products are at first 0: the running mean of the trained ones.
      rehearsal: texts like those that the heads were trained on, so that these are not forgotten; [] without any.
    """

    def __init__(self, model: Model) -> None:
        files, plain = model.heads_files, Storage()
        assert files is not None
        (_, heads), lm_head = files.read(plain), files.lm_head(plain)
        self.rehearsal = read_rehearsal(files.stored.directory, model.config.vocab_size)
        recipe = files.stored.meta.get("recipe", {}).get("config", {}).get("train", {})
        terms = {name: recipe[name] for name in TERMS if name in recipe}
        terms["confidence_weight"] = float(has_confidence(model.drafter))
        has_levels = isinstance(model.drafter, SupportsLevels)
        terms["levels"] = min(LEVELS, model.drafter.n_heads) if has_levels else 1
        train = TrainConfig(dtype="float32", loss_chunk=CHUNK, **terms)
        arch = decoding_config(model.config)
        self._loss = HeadFunctions(model.drafter.heads, arch, train).loss
        backbone = {n: model.variables["backbone"][n] for n in ("embed_tokens", "norm")}
        self._frozen: Params = {"backbone": backbone | lm_head}
        if GROUP in heads:
            self._frozen[GROUP] = heads.pop(GROUP) | lm_head
        self.heads = jax.tree.map(lambda x: x.astype(jnp.float32), heads)
        self._model, self._merged = model, jax.jit(merged)
        rate = optax.linear_schedule(0.0, RATE, WARM_UP)
        self._adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
        self._update = jax.jit(self._adam.update)
        self._forward = jax.jit(partial(_pullback, self._adapted_sum))
        self._observed_forward = jax.jit(partial(_pullback, self._observed_sum))
        self._backward = jax.jit(lambda pullback: pullback(jnp.ones(()))[0])
        self._forgotten = jax.jit(jax.grad(moments.forgotten), static_argnums=3)
        flat = flatten_dict(self.heads, sep="/").items()
        kernels = {n: x.shape for n, x in flat if n.endswith("/kernel") and x.ndim == 2}
        sizes = {name.removesuffix("/kernel"): shape for name, shape in kernels.items()}
        self._moments = moments.no_moments(sizes) if self.rehearsal else {}
        self._rehearsed = 0
        self.begin(lora.init_factors(sizes, jax.random.key(0), RANK))

    def begin(self, factors: Params, steps: int = 0) -> None:
        """Continue from these factors: the running mean that `steps` earlier steps left."""
        self.factors = self._trained = factors
        self._state, self._steps = self._adam.init(factors), steps
        self._total, self._learned = jax.tree.map(jnp.zeros_like, factors), 0

    def add(self, window: Window) -> Iterator[bool]:
        """Accumulate the gradient of a window for the next step, yielding True after each unit of work."""
        parts = self._trained, self.heads, self._frozen, window
        gradient = yield from self._gradient(self._forward, parts)
        self._total = jax.tree.map(jnp.add, self._total, gradient)
        self._learned += int(np.sum(window.counted_1W))

    def remember(self, window: Window) -> Iterator[bool]:
        """Add a rehearsed window to what must not be forgotten, yielding True after each unit of work."""
        parts = self._moments, self.heads, self._frozen, window
        added = yield from self._gradient(self._observed_forward, parts)
        self._moments = jax.tree.map(jnp.add, self._moments, added)
        self._rehearsed += int(np.sum(window.counted_1W))

    def _gradient(self, forward: Any, parts: Any) -> Generator[bool, None, Params]:
        """The gradient with respect to the first part, by a unit of work forward and one backward."""
        pullback = jax.block_until_ready(forward(*parts))
        yield True
        gradient: Params = jax.block_until_ready(self._backward(pullback))
        yield True
        return gradient

    def step(self) -> None:
        """Take the step. One whose gradient is not finite is left out: all later weights would be NaN."""
        gradient = jax.tree.map(lambda x: x / self._learned, self._total)
        self._total, self._learned = jax.tree.map(jnp.zeros_like, self._total), 0
        if self._rehearsed:
            known = self._moments, self._rehearsed, LORA.alpha / LORA.rank
            forgotten = self._forgotten(self._trained, *known)
            gradient = jax.tree.map(lambda x, y: x + REMEMBERED * y, gradient, forgotten)
        if not jnp.isfinite(optax.tree.norm(gradient)):
            return
        updates, self._state = self._update(gradient, self._state)
        self._trained = optax.apply_updates(self._trained, updates)
        self._steps += 1
        share = max(1 - MEAN, 10 / (self._steps + 10))
        self.factors = optax.incremental_update(self._trained, self.factors, share)

    def adapted_heads(self) -> Params:
        """The heads that draft with the adapter, in the form of `Model.variables`."""
        model, loaded = self._model, self._model.variables["heads"]
        params = self._merged(self.factors, self.heads)
        params = jax.tree.map(lambda x: x.astype(model.dtype), params)
        stored = place_head(params, model.storage.of_drafts, model.llama.kernels)
        return stored | {name: loaded[name] for name in loaded if name == GROUP}

    def _adapted_sum(
        self, factors: Params, heads: Params, frozen: Params, window: Window
    ) -> jax.Array:
        with nn.intercept_methods(adapt):
            return self._sum(adapted(factors, heads), frozen, window)

    def _observed_sum(
        self, known: Params, heads: Params, frozen: Params, window: Window
    ) -> jax.Array:
        with nn.intercept_methods(moments.observe):
            return self._sum(moments.joined(heads, known), frozen, window)

    def _sum(self, heads: Params, frozen: Params, window: Window) -> jax.Array:
        """The loss of a window, times the tokens that it teaches: a step's loss is the mean over them."""
        hidden_1WE, *rows = window
        loss = self._loss(heads, frozen, hidden_1WE.astype(jnp.float32), *rows)
        return loss * jnp.sum(window.counted_1W)


def read_rehearsal(directory: str, vocab_size: int) -> list[Text]:
    """The first answers of the texts that come with these heads.

    Raises:
      UserError: they cannot be read.
    """
    file = Path(directory).parent / "rehearsal.npz"
    if not file.exists():
        return []
    try:
        with np.load(file, allow_pickle=False) as arrays:
            ends = np.cumsum(arrays["lengths"], dtype=int)[:-1]
            tokens, counted = (np.split(arrays[n], ends) for n in ("tokens", "counted"))
            outside = int(arrays["tokens"].max()) >= vocab_size
        if outside:
            raise ValueError("its texts are of another tokenizer")
        return [first_answer(*text) for text in zip(tokens, counted)]
    except (OSError, ValueError, LookupError, EOFError, BadZipFile) as error:
        raise UserError(f"{file} cannot be read: {first_line(error)}") from error


def first_answer(tokens: np.ndarray, counted: np.ndarray) -> Text:
    """A text up to the end of its first counted run.

    Example: tokens 5 6 7 8 9, counted 0 1 1 0 1: [5, 6, 7] with a prompt of one token.
    """
    start = int(counted.argmax())
    n = int(np.append(~counted[start:], True).argmax())
    return Text(tokens[: start + n].tolist(), start)


def merged(factors: Params, heads: Params) -> Params:
    """The heads with the adapter added to their kernels."""
    return lora.merged(heads, factors, LORA)


def adapted(factors: Params, heads: Params) -> Params:
    """The heads with the adapter next to their kernels, for `adapt`."""
    flat = flatten_dict(heads)
    for (*path, name), factor in flatten_dict(lora.scale(factors, LORA)).items():
        flat[*path, ENTRY, name] = factor
    return unflatten_dict(flat)  # type: ignore[no-any-return]


adapt = moments.at_products(ENTRY, with_adapter)


def _pullback(function: Callable[..., jax.Array], of: Params, *others: Any) -> Any:
    """The backward pass of a function with respect to its first argument, to be called with 1."""
    return jax.vjp(lambda of: function(of, *others), of)[1]
