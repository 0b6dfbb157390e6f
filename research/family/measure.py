"""Measure trained drafters: accuracies, accepted lengths, drafting time; speeds in interleaved runs."""

import hashlib
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.api import Model, Options, load
from medusa_jax.api.prompts import Prompt
from medusa_jax.commands.flags import flag, numbers
from medusa_jax.console import inform
from medusa_jax.evaluate.prompt_files import DEMO_PROMPTS, read_prompts, record_prompt
from medusa_jax.evaluate.race import Contender, ourselves, race
from medusa_jax.evaluate.step_clock import StepClock
from medusa_jax.evaluate.tables import device_facts
from medusa_jax.evaluate.tree_fit import rank_texts
from medusa_jax.heads.drafter import Committed, DraftRequest, Ranked
from medusa_jax.heads.vocabulary import for_drafting
from medusa_jax.model.backbone import Backbone
from medusa_jax.sharding import Params, PyTree
from medusa_jax.tree import growth
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json, write_json
from research.weights import trained_shapes

# Number of timed runs (their median counts), and of steps in each.
ROUNDS, STEPS = 7, 50


def draft_seconds(model: Model, tree: Tree) -> float:
    """Median seconds of one commit and propose, all on the device, batch 1.

    Every iteration reads the drafts of the previous one, so that XLA cannot hoist work out of the loop.
    """
    drafter, dtype, L = model.drafter, model.dtype, tree.path_length
    V = model.config.vocab_size

    @jax.jit
    def many(variables: Params, hidden_1LE: jax.Array) -> jax.Array:
        backbone = for_drafting(
            Backbone(model.llama, variables["backbone"]), variables["heads"]
        )

        def one(i: jax.Array, carry: PyTree) -> PyTree:
            state, nodes_1M = carry
            ids_1L = jnp.broadcast_to(nodes_1M[:, -1:], (1, L)) % V
            moved = hidden_1LE * (1 + 1e-6 * ids_1L[..., None].astype(dtype))
            position_1L = i + jnp.arange(L)[None, :]
            n_1 = jnp.ones((1,), jnp.int32)
            new = Committed(moved.astype(dtype), ids_1L, ids_1L, position_1L, n_1)
            state = drafter.commit(variables["heads"], backbone, state, new)
            request = DraftRequest(ids_1L[:, 0], tree, lambda depth, x: Ranked(x, x))
            filled = drafter.propose(variables["heads"], backbone, state, request)
            return state, filled.nodes_BM.astype(jnp.int32)

        start = drafter.start(1, 2 * STEPS + L, dtype)
        first = jnp.zeros((1, tree.n_nodes), jnp.int32)
        return lax.fori_loop(0, STEPS, one, (start, first))[1]

    rng = np.random.default_rng(0)
    E = (1 + len(drafter.taps)) * model.config.d_model
    hidden = jnp.asarray(rng.standard_normal((1, L, E)), dtype)
    many(model.variables, hidden).block_until_ready()
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        many(model.variables, hidden).block_until_ready()
        times.append((time.perf_counter() - begin) / STEPS)
    return statistics.median(times)


def step_seconds(model: Model, tree: Tree, prompt: Prompt) -> float:
    """Median seconds of one decode step, after a run that compiles."""
    engine = model.engine(tree)
    clock = StepClock([engine], model.variables, model.encode(prompt))
    _, *seconds = [clock.seconds(engine) for _ in range(1 + ROUNDS)]
    return statistics.median(seconds)


@dataclass(frozen=True, kw_only=True)
class Study:
    """The measurements of `python -m research family`."""

    model: str = flag("directory of the backbone")
    calibration: str = flag("JSONL of prompts to fit trees on")
    calibration_limit: int = flag("most prompts to fit trees on", 64)
    prompts: str = flag(
        "JSONL of prompts to decode (not those of --calibration)", str(DEMO_PROMPTS)
    )
    limit: int = flag("most prompts to decode", 32)
    nodes: tuple[int, ...] = flag(
        "tree sizes, root included", "8,64", type=numbers(least=2)
    )
    max_new_tokens: int = flag("of a text", 200)
    repeats: int = flag("timed runs per prompt", 3)


def measure_one(study: Study, run: Path) -> Json:
    """Accuracies, accepted lengths and times of one trained drafter, kept in measured.json."""
    heads = (run / "export" / "heads.safetensors").read_bytes()
    names = (
        "model", "calibration", "calibration_limit", "prompts", "limit", "nodes", "max_new_tokens",
    )  # fmt: skip
    settings = {name: getattr(study, name) for name in names}
    settings["nodes"] = ",".join(map(str, study.nodes))
    settings["heads"] = hashlib.sha256(heads).hexdigest()
    path = run / "measured.json"
    if path.exists():
        figures: Json = json.loads(path.read_text())
        if figures["settings"] == settings:
            inform(f"{path} exists, not measured again")
            return figures
    model = load(study.model, str(run / "export"), tree="none")
    questions = read_prompts(study.prompts, study.limit)
    fitted = read_prompts(study.calibration, study.calibration_limit)
    prompts = [record_prompt(model, question) for question in fitted]
    options = Options(max_new_tokens=study.max_new_tokens)
    tuples_PK = growth.TextRanks.join(rank_texts(model, prompts, options)).ranks_PK
    decoded = []
    prompt_ids = [model.encode(record_prompt(model, question)) for question in questions]
    plain_entrant = ourselves(model, Tree.none(), options)
    for size in study.nodes:
        tree = Tree.from_choices(growth.joint_growth(tuples_PK, size - 1))
        # `race_first_seeds` measures speeds, so one run is enough here.
        row = race([plain_entrant, ourselves(model, tree, options)], prompt_ids, 1)[1]
        step = step_seconds(model, tree, prompts[0])
        draft = draft_seconds(model, tree)
        counted = ("mean_accepted_length", "divergences", "prompts")
        decoded.append(
            {"nodes": tree.n_nodes, "choices": [list(c) for c in tree.choices]}
            | {name: row[name] for name in counted}
            | {"step_seconds": step, "draft_seconds": draft, "draft_share": draft / step}
        )  # fmt: skip
    trained = trained_shapes(model.config, model.drafter)
    figures = {
        "settings": settings,
        "drafter": model.drafter.heads.drafter,
        # In training form: decoding packs several 8-bit weights into a word.
        "parameters": sum(x.size for x in jax.tree.leaves(trained["heads"])),
        "top1": (tuples_PK == 0).mean(axis=0).tolist(),
        "top5": (tuples_PK < 5).mean(axis=0).tolist(),
        "chain": growth.chain_length(tuples_PK),
        "positions": len(tuples_PK),
        "decoded": decoded,
        "device": device_facts()["device"],
    }
    write_json(path, figures)
    return figures


def race_first_seeds(
    study: Study, runs_of: dict[str, list[Path]], runs: dict[str, list[Json]]
) -> dict[str, list[dict[str, float]]]:
    """Speed of every drafter's first seed per tree size, in one race (`evaluate/race.py`)."""
    options = Options(max_new_tokens=study.max_new_tokens)
    contenders: list[Contender] = []
    for name, paths in runs_of.items():
        model = load(study.model, str(paths[0] / "export"), tree="none")
        if not contenders:
            contenders.append(ourselves(model, Tree.none(), options))
        for row in runs[name][0]["decoded"]:
            tree = Tree.from_choices(row["choices"])
            contenders.append(ourselves(model, tree, options, label=name))
    questions = read_prompts(study.prompts, study.limit)
    prompts = [model.encode(record_prompt(model, question)) for question in questions]
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in runs_of}
    for row in race(contenders, prompts, max(study.repeats, 1))[1:]:
        fields = {"nodes": row["tree_nodes"]}
        fields |= {field: row[field] for field in ("speedup", "step_latency_ratio")}
        figures[row["label"]].append(fields)
    return figures
