"""Certificates of draft heads: the inputs of heads at the first positions of a text, and their outputs.

Heads that are read wrong still draft, only badly: no loader notices another tapped layer, or a norm that is left out. An
engine that computes the recorded answers from the recorded inputs has read them right. docs/formats.md has the format.
"""

import json
import math
import os
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.api import Model, find_model, load
from medusa_jax.errors import UserError
from medusa_jax.files.hf import BaseFiles
from medusa_jax.files.layouts.native_heads import CERTIFICATE
from medusa_jax.files.tensor import read_whole
from medusa_jax.files.tensors import open_safetensors, save_safetensors
from medusa_jax.heads.drafter import Drafter, TextRows
from medusa_jax.heads.state import PositionState
from medusa_jax.heads.tapped import TappedDrafter
from medusa_jax.heads.vocabulary import for_drafting
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.kernels import PLAIN
from medusa_jax.sharding import Params
from medusa_jax.whole_files import Json

FORMAT = {"format": "draft_heads.certificate", "version": "1"}
# P, and the tokens whose logits are recorded.
POSITIONS, TOP = 10, 8
# Largest differences, as a share of the largest number, by whether the model has the recorded fingerprint. If not, it
# may be a quantised copy, and heads may use its embedding and LM head.
FUSED, LOGITS, STATES = 1e-3, {True: 0.01, False: 0.1}, {True: 0.05, False: 0.5}


class Certificate(NamedTuple):
    """The recorded arrays, and facts that they may not show, such as a window that is wider than P."""

    arrays: dict[str, np.ndarray]
    facts: Json


class Line(NamedTuple):
    """A comparison: the largest difference, the largest that fits, and the likeliest cause of a larger one."""

    what: str
    difference: float
    limit: float
    cause: str


def open_plain(model: str | None, drafter: str) -> Model:
    """Load heads and model in float32 without anything that is made for speed; any model of their sizes.

    Raises:
      UserError: the model is larger than memory.
    """
    tensors = BaseFiles.open(find_model(model)).tensors
    n_bytes = 4 * sum(math.prod(tensor.shape) for tensor in tensors.values())
    if n_bytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise UserError("the model in float32 is larger than this machine's memory")
    plain: Json = {"dtype": "float32", "weights": "float32", "draft_weights": "float32"}
    return load(model, drafter, tree="none", allow_other_base=True, kernels=PLAIN, **plain)


@jax.jit
def _streams(backbone: Backbone, text_T: jax.Array) -> jax.Array:
    """The last hidden states of a text, and the streams that enter each layer and leave the last: [L + 2, T, D]."""
    layers = tuple(range(backbone.llama.config.n_layers + 1))
    row = text_T[None], jnp.arange(text_T.size)[None], jnp.ones_like(text_T)[None]
    hidden_TE = backbone.tapped(layers).forward(*row)[0]
    return jnp.stack(jnp.split(hidden_TE, 1 + len(layers), axis=-1))


@partial(jax.jit, static_argnums=0)
def _replay(
    drafter: Drafter, params: Params, backbone: Backbone, text_T: jax.Array, read_APD: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The fused states [P, D], the logits of every level [K, P, O] in this text, and the tokens that they score [O]."""
    (A, P, D), T, backbone = read_APD.shape, text_T.size, for_drafting(backbone, params)
    states_PE = jnp.moveaxis(read_APD, 0, 1).reshape(P, A * D)
    unread = D if drafter.taps else 0  # the last hidden states
    hidden_BTE = jnp.pad(states_PE, ((0, T - P), (unread, 0)))[None]
    row = text_T[None], jnp.arange(T)[None], jnp.ones_like(text_T)[None]
    features = drafter.features(params, backbone, TextRows(hidden_BTE, *row))[:, 0, :P]
    logits = [drafter.head_logits(params, backbone, k, x) for k, x in enumerate(features)]
    fused_PD = states_PE[:, :D]  # for a drafter without `first_input`
    if isinstance(drafter, TappedDrafter):
        fused_PD = drafter.first_input(params, backbone, hidden_BTE)[0, :P]
    return fused_PD, jnp.stack(logits), backbone.ids_of(jnp.arange(backbone.outputs))


def replay(model: Model, text_T: np.ndarray, read_APD: np.ndarray) -> list[np.ndarray]:
    """`_replay` with a model's heads."""
    parts = model.drafter, model.variables["heads"], model.backbone
    return [np.asarray(x) for x in _replay(*parts, text_T, read_APD)]


def record(model: Model) -> Certificate:
    """Record the heads of a model on ten random tokens, a root and the chain that they draft after it."""
    K, P, chain = model.drafter.n_heads, POSITIONS, list[int]()
    text_T = np.zeros(P + K, np.int32)
    text_T[: P + 1] = np.random.default_rng(0).integers(0, model.config.vocab_size, P + 1)
    places = [tap + 1 for tap in model.drafter.taps] or [0]
    read_APD = np.asarray(_streams(model.backbone, text_T))[places, :P]
    for k in range(K):  # the guess of a level is the next one's input
        fused_PD, logits_KPO, ids_O = replay(model, text_T, read_APD)
        chain.append(ids_O[logits_KPO[k, -1].argmax()])
        text_T[P + k + 1 : P + k + 2] = chain[k]
    best_KPN = np.argsort(-logits_KPO, axis=-1, kind="stable")[..., :TOP]
    arrays = {"token_ids": text_T, "states": read_APD, "fused": fused_PD}
    arrays["top_ids"] = ids_O[best_KPN].astype("int32")
    arrays["chain"] = np.array(chain, "int32")
    arrays["top_logits"] = np.take_along_axis(logits_KPO, best_KPN, -1)
    if not model.drafter.taps:
        del arrays["fused"]
    return Certificate(arrays, _facts(model))


def rounded(model: Model, dtype: str) -> Model:
    """Round the heads to `dtype`, in place; returns the model."""

    def rounded(x: jax.Array) -> jax.Array:
        return (
            x.astype(dtype).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
        )

    model.variables["heads"] = jax.tree.map(rounded, model.variables["heads"])
    return model


def write(directory: str, certificate: Certificate) -> str:
    """Write a certificate into a directory of heads; returns its file."""
    file = os.path.join(directory, CERTIFICATE)
    os.makedirs(os.path.dirname(file), exist_ok=True)
    arrays, facts = certificate
    save_safetensors(file, arrays, FORMAT | {"facts": json.dumps(facts)})
    return file


def read(directory: str) -> Certificate:
    """Read the certificate in a directory of heads.

    Raises:
      UserError: there is none, it is not of this version or not whole.
    """
    from safetensors import safe_open

    file = os.path.join(directory, CERTIFICATE)
    if not os.path.isfile(file):
        raise UserError(
            f"{directory} has no {CERTIFICATE}: the same command with --write adds it"
        )
    arrays = {name: read_whole(x) for name, x in open_safetensors(file).items()}
    given = safe_open(file, framework="np").metadata() or {}
    if not FORMAT.items() <= given.items():
        raise UserError(f"{file} is no certificate of version {FORMAT['version']}")
    try:
        facts, (K, P, N) = json.loads(given["facts"]), arrays["top_ids"].shape
        A, _, D = arrays["states"].shape
        forms = {
            "token_ids": ("i", (P + K,)),
            "chain": ("i", (K,)),
            "states": ("f", (A, P, D)),
            "top_ids": ("i", (K, P, N)),
            "top_logits": ("f", (K, P, N)),
        }
        forms |= {"fused": ("f", (P, D))} if facts["taps"] else {}
        fits = forms == {name: (x.dtype.kind, x.shape) for name, x in arrays.items()}
        fits &= {"model", "window"} <= facts.keys()
    except (ValueError, LookupError, TypeError):
        fits = False
    if not fits:
        raise UserError(f"{file} is damaged: delete it, and record another with --write")
    return Certificate(arrays, facts)


def _facts(model: Model) -> Json:
    window = getattr(model.drafter.heads, "window", 0)
    return {"model": model.fingerprint, "taps": [*model.drafter.taps], "window": window}


def compare(certificate: Certificate, model: Model) -> list[Line]:
    """Replay a certificate. The first line that does not fit has the likeliest cause.

    Raises:
      UserError: heads of other sizes.
    """
    (given, recorded), ours = certificate, _facts(model)
    own = [tap + 1 for tap in ours["taps"]] or [0]
    text_T, read_APD = given["token_ids"], given["states"]
    is_same = recorded["model"] == ours["model"]
    K, sizes = len(given["chain"]), (len(own), model.config.d_model)
    # Heads that share their layers may have more levels than were recorded.
    if model.drafter.n_heads < K or (len(read_APD), read_APD.shape[-1]) != sizes:
        raise UserError("the certificate is for heads of other sizes")
    cause = f"taps and window are {ours}, recorded as {recorded}"
    changed = any(ours[x] != recorded[x] for x in ("taps", "window"))
    lines = [Line("taps and window", float(changed), 0.0, cause)]

    # Taps are right if no other stream is nearer, in any storage of the model.
    streams_LPD = np.asarray(_streams(model.backbone, text_T))[:, : read_APD.shape[1]]
    apart_ALP = np.linalg.norm(read_APD[:, None] - streams_LPD, axis=-1)
    apart_AL = (apart_ALP / np.linalg.norm(read_APD, axis=-1)[:, None]).mean(-1)
    nearest, limit = apart_AL.argmin(-1).tolist(), STATES[is_same]
    cause = "the model or its embedding is another"
    if nearest != own and apart_AL.min(-1).max() <= limit:
        cause, limit = "the recorded streams enter other layers: the taps are shifted", 0.0
    apart = float(apart_AL[range(len(own)), own].max())
    lines.append(Line("states of the model", apart, limit, cause))

    fused_PD, logits_KPO, ids_O = replay(model, text_T, read_APD)
    cause = "fc is transposed or another, or a norm of the streams is left out"
    if "fused" in given:
        apart = _difference(fused_PD, given["fused"])
        lines.append(Line("fused states", apart, FUSED, cause))
    limit, fault = LOGITS[is_same], "the base of the rotation is another"
    fault = "a window is dropped" if recorded["window"] else fault
    if not isinstance(model.drafter.start(1, 1, "float32"), PositionState):
        fault = ""  # no attention
    return lines + _levels(given, logits_KPO[:K], ids_O, limit, fault)


def _levels(
    given: dict[str, np.ndarray], logits_KPO: np.ndarray, ids_O: np.ndarray, limit: float, fault: str
) -> list[Line]:  # fmt: skip
    """The logits of every level at the recorded tokens, and the chain.

    Args:
      fault: of the attention, the likeliest if only the first positions fit; "" if the heads have none.
    """
    ids_KPN, recorded_KPN = given["top_ids"], given["top_logits"]
    ours_KPN = _at(ids_KPN, logits_KPO, ids_O)
    best_KPN = -np.sort(-logits_KPO, axis=-1)[..., : ids_KPN.shape[-1]]
    fits_P = [_difference(*x) <= limit for x in zip(ours_KPN[0], recorded_KPN[0])]
    fitting = [*fits_P, False].index(False)
    cause = "a norm is left out, the embedding or the rotation is another, or the heads are"
    if not fault:
        cause = "the heads or their LM heads are others"
    if _difference(best_KPN, recorded_KPN) <= limit:
        cause = "the logits belong to other tokens: the draft vocabulary (d2t) is lost"
    elif fault and 0 < fitting < len(fits_P):
        cause = f"only the first positions fit ({fitting}): {fault}"
    pairs = enumerate(zip(ours_KPN, recorded_KPN), 1)
    lines = [Line(f"logits of level {k}", _difference(*x), limit, cause) for k, x in pairs]
    last_KO = logits_KPO[:, -1]
    behind_K = last_KO.max(-1) - _at(given["chain"][:, None], last_KO, ids_O)[:, 0]
    largest_K = np.maximum(np.abs(recorded_KPN).max((1, 2)), 1e-30)
    apart = float((behind_K / largest_K).max())
    cause = "the chain is another, or rows of the LM head for tokens that are not recorded"
    return [*lines, Line("greedy chain", apart, limit, cause)]


def _at(ids_N: np.ndarray, logits_O: np.ndarray, ids_O: np.ndarray) -> np.ndarray:
    """The logits of some tokens [..., N], -inf for those that are not among the scored ones."""
    at_N = np.searchsorted(ids_O, ids_N) % len(ids_O)
    return np.where(ids_O[at_N] == ids_N, np.take_along_axis(logits_O, at_N, -1), -np.inf)


def _difference(x: np.ndarray, recorded: np.ndarray) -> float:
    """The largest difference over the largest recorded number; infinite for NaN."""
    difference = float(np.abs(x - recorded).max() / max(np.abs(recorded).max(), 1e-30))
    return np.inf if np.isnan(difference) else difference
