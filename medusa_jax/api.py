"""The Python interface: `load` a backbone with its draft heads, then `generate` or `stream`.

decode.py, the notebooks, the evaluators and the tests all go through here.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.config import HeadsConfig, LlamaConfig
from medusa_jax.decoding import generate as loop
from medusa_jax.decoding.accept import LOSSLESS
from medusa_jax.errors import UserError
from medusa_jax.heads import DRAFTERS, Base, Drafter, make_drafter
from medusa_jax.interop import heads_io, hf
from medusa_jax.interop.hub import resolve
from medusa_jax.interop.tokenizer import StreamDecoder, Tokenizer, load_tokenizer
from medusa_jax.model.llama import Llama, decoding_config, prepare
from medusa_jax.sharding import make_mesh, param_shardings
from medusa_jax.tree import Tree, load_tree_file, parse_tree, tree_of_size

DEMO = Path(__file__).parent / "demo"
DTYPES = ("float64", "float32", "bfloat16", "float16")
# The size that a calibrated order is cut to on a device it was not fitted for: on
# accelerators the paper's 64 nodes cost little more than one.
ACCELERATOR_NODES = 64


@dataclasses.dataclass(frozen=True)
class Options:
    """How one request is decoded.

    Attributes:
      max_new_tokens: most tokens to emit.
      temperature: 0 is greedy.
      top_k, top_p, min_p: filters, applied in this order after temperature; 0, 1, 0 are off.
      seed: with the request's place in the input it decides every random draw.
      stop: strings that end the text; they are cut off.
    """

    max_new_tokens: int = 200
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be 0 or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p must be in [0, 1], not {self.min_p}")
        if self.top_k < 0:
            raise UserError(f"top_k must be 0 (off) or more, not {self.top_k}")


@dataclasses.dataclass
class Result:
    """One decoded request.

    Attributes:
      text, token_ids: what was generated (an EOS token is kept in `token_ids`).
      draft_depths: for each token the tree depth it was accepted at; 0 = the verifier's own.
      finish_reason: "stop" (EOS or stop string), "length" or "context".
      steps: decode steps after prefill.
      mean_accepted_length: tokens appended per step, bonus token included.
      acceptance_histogram: steps that appended 1, 2, ... tokens.
      prefill_seconds, decode_seconds: of the whole batch; compilation is in neither.
    """

    text: str
    token_ids: list[int]
    draft_depths: list[int]
    finish_reason: str
    prompt_tokens: int
    steps: int
    acceptance_histogram: list[int]
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def mean_accepted_length(self) -> float:
        appended = sum((i + 1) * n for i, n in enumerate(self.acceptance_histogram))
        return appended / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first one, per second of decoding."""
        if self.new_tokens < 2 or self.decode_seconds <= 0:
            return 0.0
        return (self.new_tokens - 1) / self.decode_seconds


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text of one row while streaming: pairs of text and draft depth."""

    row: int
    text: str
    parts: list[tuple[str, int]]


class Model:
    """A backbone with draft heads, ready to decode. Made by `load`.

    Attributes:
      config: shape of the backbone.
      drafter, head_params: the draft heads.
      tokenizer: text to ids and back.
      tree: the default draft tree.
      calibrated: content of the tree file beside the heads, or None.
    """

    def __init__(
        self,
        config: LlamaConfig,
        params: Any,
        tokenizer: Tokenizer,
        drafter: Drafter,
        head_params: Any,
        *,
        dtype: Any,
        mesh: jax.sharding.Mesh,
        calibrated: dict | None = None,
        eos_ids: Sequence[int] | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.mesh = mesh
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.calibrated = calibrated
        self.eos_ids = tuple(sorted(tokenizer.eos_ids if eos_ids is None else eos_ids))
        shards = mesh.shape["tensor"]
        self.llama = Llama(decoding_config(config), dtype, shards=shards)
        fuse = partial(prepare, config=config, dtype=dtype, shards=shards)
        shardings = param_shardings(mesh, jax.eval_shape(fuse, params))
        self.variables = {
            "base": jax.jit(fuse, out_shardings=shardings)(params),
            "heads": jax.tree.map(lambda x: x.astype(dtype), head_params),
        }
        self.tree = self._default_tree()
        self._warm: set[Any] = set()

    @property
    def base(self) -> Base:
        """The backbone as drafters see it."""
        return Base(self.llama, self.variables["base"])

    def _default_tree(self) -> Tree:
        if self.calibrated is None:
            return (
                Tree.chain(self.drafter.n_heads) if self.variables["heads"] else Tree.none()
            )
        platform = jax.default_backend()
        if platform == "cpu" or self.calibrated.get("platform") == platform:
            return parse_tree("auto", self.calibrated)
        growth = self.calibrated.get("growth", self.calibrated["choices"])
        return tree_of_size(growth, min(ACCELERATOR_NODES, len(growth) + 1))

    def parse_tree(self, spec: str | Tree | None) -> Tree:
        """The tree a `--tree` value names, checked against the heads that are there."""
        if isinstance(spec, Tree):
            tree = spec
        elif spec is None or spec == "auto":
            tree = self.tree
        else:
            tree = parse_tree(spec, self.calibrated)
        if tree.depth and not self.variables["heads"]:
            raise UserError("no draft heads are loaded: give --drafter, or use --tree none")
        tree.check_depth(self.drafter.n_heads)
        if tree.max_rank >= self.config.vocab_size:
            raise UserError(f"tree rank {tree.max_rank} exceeds the vocabulary")
        return tree

    def engine(
        self,
        tree: str | Tree | None = None,
        acceptance: str = "auto",
        sampled: bool = False,
        epsilon: float = 0.09,
        delta: float = 0.3,
    ) -> loop.Engine:
        """The compile-time part of decoding. `sampled`: whether any row has temperature > 0."""
        if acceptance == "auto":
            acceptance = "sampled" if sampled else "greedy"
        if acceptance == "rejection":
            raise UserError(
                "acceptance 'rejection' is not built yet; 'sampled' is lossless too"
            )
        if acceptance not in LOSSLESS:
            known = "auto, greedy, sampled, typical"
            raise UserError(f"unknown acceptance {acceptance!r}: there are {known}")
        if acceptance == "greedy" and sampled:
            raise UserError("acceptance 'greedy' needs temperature 0")
        if acceptance == "typical" and not (0 < epsilon <= 1 and delta > 0):
            raise UserError(
                f"epsilon must be in (0, 1] and delta positive: {epsilon}, {delta}"
            )
        return loop.Engine(
            self.llama,
            self.drafter,
            self.parse_tree(tree),
            acceptance,
            eos_ids=self.eos_ids,
            epsilon=epsilon,
            delta=delta,
        )

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt, BOS first where the tokenizer puts one.

        Raises:
          UserError: nothing to start from (an empty prompt and no BOS), or ids out of range.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_bos=True)
        else:
            ids = [int(i) for i in prompt]
            if any(not 0 <= i < self.config.vocab_size for i in ids):
                raise UserError(
                    f"a prompt id is outside the vocabulary 0..{self.config.vocab_size - 1}"
                )
        if not ids:
            if self.tokenizer.bos_id is None:
                raise UserError(
                    "the prompt is empty and the tokenizer has no BOS to start from"
                )
            ids = [self.tokenizer.bos_id]
        return ids

    def request(
        self, prompts: Sequence[str | Sequence[int]], options: Sequence[Options]
    ) -> loop.Request:
        """Prompts and per-row options as the decode loop takes them.

        Raises:
          UserError: a prompt that leaves no room in the context.
        """
        encoded = [self.encode(p) for p in prompts]
        context = self.config.max_position
        for ids in encoded:
            if len(ids) >= context:
                raise UserError(
                    f"the prompt has {len(ids)} tokens, the model's context is {context}: "
                    "shorten it"
                )
        return loop.Request(
            prompts=encoded,
            limits=[
                min(o.max_new_tokens, context - len(p)) for o, p in zip(options, encoded)
            ],
            temperature=[o.temperature for o in options],
            top_k=[o.top_k for o in options],
            top_p=[o.top_p for o in options],
            min_p=[o.min_p for o in options],
            seed=[o.seed % 2**32 for o in options],
        )

    def _compile(self, engine: loop.Engine, request: loop.Request) -> float:
        """Seconds spent on compiling what this request needs (0 when it is there already)."""
        longest, limit = max(map(len, request.prompts)), max(request.limits)
        needed = max(len(p) + n for p, n in zip(request.prompts, request.limits))
        ladder = loop.slot_ladder(engine, longest, needed + engine.tree.n_nodes)
        shape = (
            engine,
            len(request.prompts),
            loop.power_of_two(longest, 1),
            limit,
            *ladder,
        )
        if shape in self._warm:
            return 0.0
        start = time.perf_counter()
        loop.warm_up(engine, self.variables, request)
        self._warm.add(shape)
        return time.perf_counter() - start

    def compile(
        self,
        prompts: Sequence[str | Sequence[int]],
        options: Options | Sequence[Options] = Options(),
        **engine_options: Any,
    ) -> float:
        """Compile what `generate` or `stream` will run for these prompts; seconds it took."""
        _, engine, request = self._plan(prompts, options, engine_options)
        return self._compile(engine, request)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        options: Options | Sequence[Options] = Options(),
        **engine_options: Any,
    ) -> list[Result]:
        """Decode a batch of prompts to their ends.

        Args:
          prompts: texts or lists of token ids; rows may differ in length.
          options: one for all, or one per prompt.
          engine_options: `tree`, `acceptance`, `epsilon`, `delta` as for `engine`.

        Returns: one result per prompt, in order.
        """
        rows, engine, request = self._plan(prompts, options, engine_options)
        compile_seconds = self._compile(engine, request)
        if any(o.stop for o in rows):
            *_, (_, results) = self._stream(rows, engine, request, compile_seconds)
            assert results is not None
            return results
        start = time.perf_counter()
        state, ladder = jax.block_until_ready(loop.begin(engine, self.variables, request))
        middle = time.perf_counter()
        progress = jax.block_until_ready(loop.finish(engine, self.variables, state, ladder))
        end = time.perf_counter()
        seconds = (middle - start, end - middle, compile_seconds)
        return self._results(rows, request, progress, seconds)

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        options: Options | Sequence[Options] = Options(),
        **engine_options: Any,
    ) -> Iterator[tuple[list[Piece], list[Result] | None]]:
        """Decode while handing out text: yields (new pieces, None), and at the end the results."""
        rows, engine, request = self._plan(prompts, options, engine_options)
        yield from self._stream(rows, engine, request, self._compile(engine, request))

    def _plan(
        self,
        prompts: Sequence[str | Sequence[int]],
        options: Options | Sequence[Options],
        engine_options: dict[str, Any],
    ) -> tuple[list[Options], loop.Engine, loop.Request]:
        if isinstance(prompts, str):
            raise TypeError("prompts is a list; give [prompt] for a single one")
        rows = [options] * len(prompts) if isinstance(options, Options) else list(options)
        if not rows or len(rows) != len(prompts):
            raise UserError(f"{len(prompts)} prompts but {len(rows)} options")
        sampled = any(o.temperature > 0 for o in rows)
        engine = self.engine(sampled=sampled, **engine_options)
        return rows, engine, self.request(prompts, rows)

    def _stream(
        self,
        rows: list[Options],
        engine: loop.Engine,
        request: loop.Request,
        compile_seconds: float,
    ) -> Iterator[tuple[list[Piece], list[Result] | None]]:
        """Streaming with stop strings: a row that meets one is cut and shown no further."""
        texts = [StoppingText(self.tokenizer, o.stop) for o in rows]
        shown = [0] * len(rows)
        start = time.perf_counter()
        prefilled = None
        progress = None
        for progress in loop.stream(engine, self.variables, request):
            tokens, depths = np.asarray(progress.tokens_BO), np.asarray(progress.depth_BO)
            counts = np.asarray(progress.n_new_B)
            prefilled = prefilled or time.perf_counter()
            ended = np.asarray(progress.status_B) != loop.RUNNING
            pieces = []
            for row, text in enumerate(texts):
                new = range(shown[row], int(counts[row]))
                parts = [
                    (piece, int(depths[row, i]))
                    for i in new
                    if (piece := text.push(int(tokens[row, i])))
                ]
                shown[row] = int(counts[row])
                if ended[row] and (rest := text.flush()):
                    parts.append((rest, 0))
                if parts:
                    pieces.append(Piece(row, "".join(p for p, _ in parts), parts))
            yield pieces, None
            if all(t.stopped or e for t, e in zip(texts, ended)):
                break
        end = time.perf_counter()
        assert progress is not None and prefilled is not None
        seconds = (prefilled - start, end - prefilled, compile_seconds)
        results = self._results(rows, request, progress, seconds)
        for result, text in zip(results, texts):
            if text.stopped:
                result.text = text.text
                result.finish_reason = "stop"
                result.token_ids = result.token_ids[: text.tokens_used]
                result.draft_depths = result.draft_depths[: text.tokens_used]
                result.acceptance_histogram = steps_of(
                    result.draft_depths, len(result.acceptance_histogram)
                )
                result.steps = sum(result.acceptance_histogram)
        yield [], results

    def _results(
        self,
        rows: list[Options],
        request: loop.Request,
        progress: loop.Progress,
        seconds: tuple[float, float, float],
    ) -> list[Result]:
        tokens, depths = np.asarray(progress.tokens_BO), np.asarray(progress.depth_BO)
        counts, status = np.asarray(progress.n_new_B), np.asarray(progress.status_B)
        steps, histogram = np.asarray(progress.steps_B), np.asarray(progress.histogram_BL)
        results = []
        for row, options in enumerate(rows):
            ids = tokens[row, : counts[row]].tolist()
            reason = "length"
            if status[row] == loop.STOPPED:
                reason = "stop"
            elif request.limits[row] < options.max_new_tokens:
                reason = "context"
            results.append(
                Result(
                    text=self.tokenizer.decode(ids),
                    token_ids=ids,
                    draft_depths=depths[row, : counts[row]].tolist(),
                    finish_reason=reason,
                    prompt_tokens=len(request.prompts[row]),
                    steps=int(steps[row]),
                    acceptance_histogram=histogram[row].tolist(),
                    prefill_seconds=seconds[0],
                    decode_seconds=seconds[1],
                    compile_seconds=seconds[2],
                )
            )
        return results


def steps_of(draft_depths: Sequence[int], longest: int) -> list[int]:
    """Steps that appended 1, ..., `longest` tokens, told from the depths of a cut text.

    Every step ends with a token of depth 0, the verifier's own; the first token is prefill's.

    Example: [0, 1, 2, 0, 0, 1] is prefill, a step of three tokens, one of one, and one that
    was cut behind its first draft: [2, 0, 1].
    """
    histogram = [0] * longest
    length = 0
    for at, depth in enumerate(draft_depths[1:], 2):
        length += 1
        if depth == 0 or at == len(draft_depths):
            histogram[length - 1] += 1
            length = 0
    return histogram


class StoppingText:
    """Text of one row as it grows, held back where a stop string may have begun."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stop = [s for s in stop if s]
        self._held = ""
        self.text = ""
        self.stopped = False
        self.tokens_used = 0

    def push(self, token: int) -> str:
        """Take in one token; returns the text that may be shown."""
        if self.stopped:
            return ""
        self.tokens_used += 1
        return self._release(self._decoder.push([token]), final=False)

    def flush(self) -> str:
        """The rest of the text, once the row has ended."""
        return "" if self.stopped else self._release(self._decoder.flush(), final=True)

    def _release(self, new: str, final: bool) -> str:
        self._held += new
        found = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            out, self.stopped = self._held[: min(found)], True
        else:
            keep = 0 if final else self._beginning()
            out = self._held[: len(self._held) - keep]
        self._held = self._held[len(out) :]
        self.text += out
        return out

    def _beginning(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for n in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-n:]) for s in self._stop):
                return n
        return 0


def default_dtype() -> str:
    """float32 on a CPU (its bfloat16 products are slow), bfloat16 elsewhere."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def load(
    model: str | None = None,
    drafter: str = "medusa",
    *,
    tree: str | Tree = "auto",
    dtype: str | None = None,
    mesh: Sequence[int] = (1, 1, 1),
    tokenizer: str | None = None,
    all_heads: bool = True,
) -> Model:
    """Load a backbone and its draft heads. Without arguments: the bundled demo.

    Args:
      model: directory or hub id of a Llama-family model; None is the demo.
      drafter: a name from the registry (the demo's heads of that kind), a directory or a hub
        id with heads, or "none".
      tree: the default tree, as for `--tree`.
      dtype: what to compute in; by default float32 on CPU and bfloat16 elsewhere.
      mesh: devices along data, fsdp, tensor.
      tokenizer: directory or hub id, if not beside the model.
      all_heads: False reads only the heads that `tree` uses.

    Raises:
      UserError: anything that cannot be read or does not fit together.
    """
    kind = dtype or default_dtype()
    if kind not in DTYPES:
        raise UserError(f"dtype is one of {', '.join(DTYPES)}, not {kind!r}")
    if kind == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        jax.config.update("jax_enable_x64", True)
    path = model or str(DEMO / "backbone")
    if model is None and not (DEMO / "backbone" / "config.json").exists():
        raise UserError("this installation has no demo model: give --model")
    heads_path = drafter
    if drafter in DRAFTERS:
        if model is not None:
            raise UserError(
                f"--drafter {drafter} names the demo's heads, which do not fit {model}: give "
                "the directory or hub id of heads trained for it, or --drafter none"
            )
        heads_path = str(DEMO / drafter)
    devices = make_mesh(mesh)
    text_to_ids = load_tokenizer(tokenizer or path)
    config, params = hf.load_backbone(path, devices, kind)
    calibrated = None
    head_params: Any = {}
    if drafter == "none":
        heads = HeadsConfig(n_heads=1, lm_head="shared")
    else:
        directory = Path(resolve(heads_path, heads_io.HEAD_FILES))
        if (directory / "tree.json").exists():
            calibrated = load_tree_file(directory / "tree.json")
        n_heads = None
        if not all_heads and (tree != "auto" or calibrated is not None):
            wanted = tree if isinstance(tree, Tree) else parse_tree(tree, calibrated)
            n_heads = _heads_needed(directory, wanted)
        fingerprint = hf.fingerprint(config, params)
        heads, head_params, _ = heads_io.load_heads(
            str(directory), config, devices, n_heads, kind, fingerprint=fingerprint
        )
    loaded = Model(
        config,
        params,
        text_to_ids,
        make_drafter(heads, config),
        head_params,
        dtype=jnp.dtype(kind),
        mesh=devices,
        calibrated=calibrated,
    )
    loaded.tree = loaded.parse_tree(tree)
    return loaded


def _heads_needed(directory: Path, tree: Tree) -> int:
    """How many heads the tree uses: deeper ones are not read. A too deep tree is refused."""
    tree.check_depth(heads_io.read_description(str(directory)).n_heads)
    return max(1, tree.depth)
