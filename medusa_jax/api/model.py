"""A loaded backbone with its draft heads."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, overload

import jax
import numpy as np

from medusa_jax.api.prompts import (
    Prompt,
    conversation,
    ends_of,
    is_message,
    prompt_ids,
    read_arguments,
    request_of,
)
from medusa_jax.api.results import DEFAULTS, Options, Result, results_of
from medusa_jax.api.step_sizes import StepSizes, text_is_free
from medusa_jax.api.text_stream import Chunk, OnEnd, OnTokens, TextStream, stream_rows
from medusa_jax.arch import LlamaConfig
from medusa_jax.decoding import generate as loop
from medusa_jax.decoding.acceptance import RULES, rule_named
from medusa_jax.decoding.penalties import any_penalties
from medusa_jax.decoding.state import Engine
from medusa_jax.decoding.stopping import pack_stops
from medusa_jax.errors import UserError, one_of
from medusa_jax.heads.drafter import Backbone, Drafter
from medusa_jax.heads.registry import no_drafter
from medusa_jax.kernels.choose import choose_kernels
from medusa_jax.model.convert import decoder
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.stored import Storage
from medusa_jax.sharding import Params
from medusa_jax.text.chat import Message
from medusa_jax.text.tokenizer import NoTokenizer, Tokenizer
from medusa_jax.tree.files import parse_tree, tree_at
from medusa_jax.tree.tree import Tree
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.constraints import Grammars


class Model:
    """A backbone with draft heads, ready to decode. Made by `load`.

    Attributes:
      config: shape of the backbone.
      drafter: the draft heads.
      variables: {"backbone": the backbone's parameters, "heads": the draft heads'}, as
        `model/convert.py` makes them.
      tokenizer: text to ids and back.
      tree: the default draft tree, for the `batch` given to `load`.
      ladder: default trees by number of rows, as far as known; {}: `tree` for all.
      mark: what the time of a step depends on besides the tree (`tree_choice.step_mark`).
      chooses: by default, steps choose among sizes of the tree, where the text cannot depend on it.
      eos_ids: tokens that end a text, unless a request names others.
      storage: the form that kernels are stored in.
      kernels: the operations that differ by platform, by default the fastest for that form.
      calibrated: content of the tree file next to the heads, or None.
      no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and text; 0 bars nothing.
      fingerprint: 16 hex digits that tell the backbone's weights from others'; "" if unknown.
    """

    def __init__(
        self,
        config: LlamaConfig,
        variables: Params,
        tokenizer: Tokenizer,
        drafter: Drafter,
        *,
        dtype: np.dtype,
        mesh: jax.sharding.Mesh,
        storage: Storage | None = None,
        kernels: Kernels | None = None,
        tree: str | Tree | None = None,
        calibrated: Json | None = None,
        ladder: Mapping[int, Tree] | None = None,
        chooses: bool = False,
        mark: str = "",
        eos_ids: Sequence[int] | None = None,
        no_repeat_ngram_size: int = 0,
        fingerprint: str = "",
        read_wide: Callable[[], Params] | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.mesh = mesh
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.variables = variables
        self.calibrated, self.ladder, self.chooses = calibrated, ladder or {}, chooses
        self.mark = mark
        ends = tokenizer.eos_ids if eos_ids is None else eos_ids
        # Elsewhere -1 matches every token.
        self.eos_ids = tuple(sorted(i for i in ends if 0 <= i < config.vocab_size))
        self.storage = storage or Storage()
        if kernels is None:
            number = dtype if self.storage.panel else None
            kernels = choose_kernels(mesh, number, config.head_dim)
        self.llama = decoder(config, dtype, mesh, self.storage, kernels)
        self.tree = drafter.default_tree if self.drafts else Tree.none()
        self.tree = self.parse_tree(tree)
        self.no_repeat_ngram_size = no_repeat_ngram_size
        self.fingerprint = fingerprint
        self._read_wide = read_wide
        self._wide: Params | None = None
        self._warm: set[tuple[object, ...]] = set()

    def __repr__(self) -> str:
        c, dtype = self.config, self.storage.weights or str(self.dtype)
        return (
            f"<Model: {c.n_layers} layers of width {c.d_model} in {dtype}, drafts by {self.drafts_by()}, "
            f"{self.tree.n_nodes} nodes>"
        )

    @property
    def drafts(self) -> bool:
        """Whether the model has heads, or a drafter that needs none."""
        return bool(self.variables["heads"]) or not self.drafter.trained

    def drafts_by(self, tree: Tree | None = None) -> str:
        """The drafter of a tree (default: the model's): "hydra", "hydra+copy", "copy" or "none"."""
        tree = self.tree if tree is None else tree
        who = [self.drafter.heads.drafter] if tree.drafted.depth else []
        return "+".join([*who, "copy"] if tree.copied_C.size else who) or "none"

    @property
    def products(self) -> str:
        """The implementation of products of few rows: "native" (our kernels) or "plain" (XLA's)."""
        return "native" if self.storage.panel else "plain"

    def guarantee(self, acceptance: str) -> bool | str:
        """Whether drafted text equals plain text: "bitwise", True (except at ties) or False."""
        rule = rule_named(acceptance)
        if not rule.lossless:
            return False
        return "bitwise" if self.llama.kernels.bitwise and not rule.by_drafts else True

    def variables_by(self, acceptance: str) -> Params:
        """`variables` for decoding by this rule.

        If the rule's text depends on the drafts and the heads were by default stored narrower than
        the weights, reads the heads again, as wide as the weights, and keeps both.
        """
        if self._read_wide is None or not rule_named(acceptance).by_drafts:
            return self.variables
        if self._wide is None:
            self._wide = self._read_wide()
        return self.variables | {"heads": self._wide}

    def draft_weights(self, acceptance: str) -> str | None:
        """The stored type of the drafter's kernels under this rule; None without kernels."""
        if not self.variables["heads"]:
            return None
        form = self.storage
        if self.drafter.trained:
            by_drafts = rule_named(acceptance).by_drafts
            form = form.of_deciding_drafts if by_drafts else form.of_drafts
        return form.weights or str(self.dtype)

    @property
    def backbone(self) -> Backbone:
        """The backbone as drafters see it."""
        return Backbone(self.llama, self.variables["backbone"])

    def tree_at(self, rows: int) -> Tree:
        """The default tree for this number of rows."""
        return tree_at(self.ladder, rows) if self.ladder else self.tree

    def parse_tree(self, spec: str | Tree | None) -> Tree:
        """The tree a `--tree` value names, checked against the loaded heads."""
        no_heads = UserError(
            "no draft heads are loaded: give --drafter, or use --tree none"
        )
        if spec is None or spec == "auto":
            tree = self.tree
        elif isinstance(spec, Tree):
            tree = spec
        elif not self.drafts and spec.isdecimal():
            raise no_heads
        else:
            tree = parse_tree(spec, self.calibrated)
        if tree.drafted.depth and not self.drafts:
            raise no_heads
        self.drafter.check_tree(tree)
        size = self.drafter.heads.draft_vocab
        if tree.max_rank >= (size or self.config.vocab_size):
            whose = f"heads' draft vocabulary of {size}" if size else "vocabulary"
            raise UserError(f"tree rank {tree.max_rank} exceeds the {whose}")
        return tree

    @read_arguments
    def engine(
        self,
        tree: str | Tree | None = None,
        acceptance: str = "auto",
        sampled: bool = False,
        logprobs: int | None = None,
    ) -> Engine:
        """The compile-time part of decoding.

        Args:
          sampled: whether any row has temperature > 0.
          logprobs: the largest number of alternatives of any row, None if no row has log-probabilities.
        """
        if acceptance == "auto":
            acceptance = "sampled" if sampled else "greedy"
        one_of("acceptance", acceptance, ("auto", *RULES))
        if acceptance == "greedy" and sampled:
            raise UserError("acceptance 'greedy' needs temperature 0")
        if (logprobs or 0) > self.config.vocab_size:
            raise UserError(
                f"logprobs {logprobs} exceeds the vocabulary of {self.config.vocab_size}"
            )
        tree = self.parse_tree(tree)
        return Engine(
            self.llama,
            # Plain decoding skips layers that only drafting needs.
            self.drafter if tree.drafted.depth else no_drafter(self.config),
            tree,
            acceptance,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            logprobs=logprobs,
        )

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt, BOS first where the tokenizer puts one.

        Raises:
          UserError: nothing to start from (an empty prompt and no BOS), or ids out of range.
        """
        return prompt_ids(self.tokenizer, prompt, self.config.vocab_size)

    def request(
        self,
        prompts: Sequence[Prompt],
        options: Sequence[Options],
        ids: Sequence[int] | None = None,
    ) -> loop.DecodeRequest:
        """Prompts and per-row options in the decode loop's form.

        Args:
          ids: request ids, which decide the noise together with the seed; by default 0, 1, ...

        Raises:
          UserError: a prompt that leaves no room in the context.
        """
        if isinstance(self.tokenizer, NoTokenizer) and any(o.stop for o in options):
            raise self.tokenizer.missing("stop strings cannot be found")
        token_ids = [self.encode(p) for p in prompts]
        guides = None
        if any(o.constraint for o in options):
            guide: Any = self._grammars.guide
            guides = [
                guide(o.constraint, ends_of(o, self.eos_ids)) if o.constraint else None
                for o in options
            ]
        return request_of(token_ids, options, self.config, self.eos_ids, ids, guides)

    @cached_property
    def _grammars(self) -> "Grammars":
        """Compiler of constraints."""
        from medusa_jax.constraints import Grammars  # here: few requests have constraints

        return Grammars(self.tokenizer, self.config.vocab_size)

    @cached_property
    def step_sizes(self) -> StepSizes:
        """The sizes that steps choose from."""
        return StepSizes(self.mark, self.calibrated)

    def _compile(self, engine: Engine, request: loop.DecodeRequest) -> float:
        """Compile the programs of a request; returns the seconds, 0 if they are already compiled.

        The first time on this machine it also measures the costs of the tree's sizes.
        """
        prompt_length = max(map(len, request.prompts))
        text_length = max(len(p) + n for p, n in zip(request.prompts, request.limits))
        ladder = loop.slot_ladder(engine, prompt_length, text_length + engine.n_rows)
        shape = (
            engine,
            len(request.prompts),
            loop.power_of_two(prompt_length, loop.MIN_PROMPT),
            loop.output_slots(engine, max(request.limits)),
            pack_stops(request.stops or ()).shape,
            (any_penalties(request.penalties), request.guides is None),
            *ladder,
        )
        if shape in self._warm:
            return 0.0
        start = time.perf_counter()
        variables = self.variables_by(engine.acceptance)
        if request.guides is None:
            loop.warm_up(engine, variables, request)
        else:
            from medusa_jax.decoding import constrained

            constrained.warm_up(engine, variables, request)
        if engine.gated and not self.step_sizes.costs(engine, len(request.prompts)):
            state, _ = loop.begin(engine, variables, request)
            request.gate = self.step_sizes.measure(engine, variables, state)
        self._warm.add(shape)
        return time.perf_counter() - start

    def compile(
        self,
        prompts: Sequence[Prompt],
        options: Options | Sequence[Options] = DEFAULTS,
        ids: Sequence[int] | None = None,
        **engine_options: Any,
    ) -> float:
        """Compile what `generate` and `stream` run for these prompts; returns the seconds."""
        _, engine, request = self.plan(prompts, options, ids, engine_options)
        return self._compile(engine, request)

    def generate(
        self,
        prompts: Sequence[Prompt],
        options: Options | Sequence[Options] = DEFAULTS,
        ids: Sequence[int] | None = None,
        watch: OnTokens | None = None,
        ended: OnEnd | None = None,
        **engine_options: Any,
    ) -> list[Result]:
        """Decode a batch of prompts to their ends.

        Args:
          prompts: texts or lists of token ids; rows may differ in length.
          options: one for all, or one per prompt.
          ids: request ids, by default 0, 1, ...: with the seed they determine every draw, so a
            prompt with the same id gets the same text in any batch and slot.
          watch: called repeatedly with the number of new tokens of every row so far.
          ended: called with the index and the result of each prompt soon after its end.
          engine_options: `tree`, `acceptance` as for `engine`.

        Returns: one result per prompt, in order.

        Raises:
          UserError: a prompt that leaves no room in the context or has ids outside the
            vocabulary, a tree that the heads cannot fill, incompatible options.
        """
        rows, engine, request = self.plan(prompts, options, ids, engine_options)
        compile_seconds = self._compile(engine, request)
        variables = self.variables_by(engine.acceptance)
        if (
            watch or ended or request.guides or any(o.stop for o in rows)
        ):  # the host takes part in every step
            parts = self.tokenizer, rows, engine, variables, request
            *_, (_, results) = stream_rows(*parts, compile_seconds, watch, ended)
            assert results is not None
            return results
        start = time.perf_counter()
        state, ladder = jax.block_until_ready(loop.begin(engine, variables, request))
        middle = time.perf_counter()
        progress = loop.finish(engine, variables, request, state, ladder)
        progress = jax.block_until_ready(progress)
        end = time.perf_counter()
        seconds = (middle - start, end - middle, compile_seconds)
        return results_of(self.tokenizer, rows, request, progress, seconds)

    @overload
    def stream(  # type: ignore[overload-overlap]  # text is a sequence of text as well
        self,
        prompts: str | Sequence[Message],
        options: Options = DEFAULTS,
        ids: Sequence[int] | None = None,
        **engine_options: Any,
    ) -> TextStream: ...

    @overload
    def stream(
        self,
        prompts: Sequence[Prompt],
        options: Options | Sequence[Options] = DEFAULTS,
        ids: Sequence[int] | None = None,
        **engine_options: Any,
    ) -> Iterator[Chunk]: ...

    def stream(
        self,
        prompts: Any,
        options: Any = DEFAULTS,
        ids: Sequence[int] | None = None,
        **engine_options: Any,
    ) -> TextStream | Iterator[Chunk]:
        """Decode a few steps at a time, yielding the new text.

        Args:
          prompts: as for `generate`; or one text or conversation, as for `chat`.
          options: one for all, or one per prompt.
          ids: as for `generate`.
          engine_options: as for `generate`.

        Returns:
          For one text or conversation, an iterator over its new text, in whole characters and
            without any possible beginning of a stop string; draft depths and the result are
            attributes. For a list of prompts, pairs (new pieces of all rows, None), and at the end
            ([], the results).

        Example:
          stream = model.stream("def parse(")
          for text in stream:
              print(text, end="", flush=True)
          print(stream.result.mean_accepted_length)
        """
        if isinstance(prompts, str):
            one: Prompt = prompts
        elif isinstance(prompts, Sequence) and any(map(is_message, prompts)):
            one, options = conversation(self.tokenizer, self.eos_ids, prompts, options)
        else:
            return self._stream(prompts, options, ids, engine_options)
        return TextStream(self._stream([one], options, ids, engine_options))

    def chat(
        self,
        messages: str | Sequence[Message],
        options: Options = DEFAULTS,
        *,
        template: str = "",
        **engine_options: Any,
    ) -> Result:
        """Answer a conversation: the reply ends where the chat template ends a turn.

        Args:
          messages: turns such as {"role": "user", "content": "Hi"} (or "system", "assistant"), the
            last one the user's; or the text of a single turn.
          template: a shipped chat template (`vicuna`, `llama3`, ...); "" is the tokenizer's own.
          engine_options: as for `generate`.

        Raises:
          UserError: as `generate`; malformed messages, or the tokenizer has no template.

        Example:
          print(model.chat([{"role": "user", "content": "Name a colour."}]).text)
        """
        prompt, options = conversation(
            self.tokenizer, self.eos_ids, messages, options, template
        )
        return self.generate([prompt], options, **engine_options)[0]

    def _stream(
        self, prompts: Any, options: Any, ids: Any, engine_options: Json
    ) -> Iterator[Chunk]:
        """Compile and decode when the first chunk is requested."""
        rows, engine, request = self.plan(prompts, options, ids, engine_options)
        seconds = self._compile(engine, request)
        variables = self.variables_by(engine.acceptance)
        yield from stream_rows(self.tokenizer, rows, engine, variables, request, seconds)

    @read_arguments
    def plan(
        self,
        prompts: Any,
        options: Options | Sequence[Options],
        ids: Sequence[int] | None,
        engine_options: Json,
    ) -> tuple[list[Options], Engine, loop.DecodeRequest]:
        """The options of each row, the engine and the request of a call of `generate`.

        Raises:
          UserError: as `generate`.
        """
        if isinstance(prompts, str | Set) or not isinstance(prompts, Iterable):
            raise UserError("prompts is a list: give [prompt] for a single one")
        # A message is one prompt, which `encode` refuses.
        prompts = [prompts] if is_message(prompts) else list(prompts)
        rows = [options] * len(prompts) if isinstance(options, Options) else [*options]
        for values, name in ((rows, "options"), (rows if ids is None else ids, "ids")):
            if not rows or len(values) != len(prompts):
                raise UserError(f"{len(prompts)} prompts but {len(values)} {name}")
        sampled = any(o.temperature > 0 for o in rows)
        logprobs = max((o.logprobs for o in rows if o.logprobs is not None), default=None)
        make = partial(self.engine, sampled=sampled, logprobs=logprobs)
        request = self.request(prompts, rows, ids)
        if not self.drafts or engine_options.get("tree") not in (None, "auto"):
            return rows, make(**engine_options), request
        engine = make(**engine_options | {"tree": self.tree_at(len(rows))})
        if self.chooses and text_is_free(engine, rows, self.dtype):
            engine = self.step_sizes.gated(self.drafter, engine)
        trees = engine.gated or (engine.tree,)
        request.sizes = [tree.n_nodes for tree in trees]
        if engine.gated:
            request.gate = self.step_sizes.gate(engine, len(rows))
        return rows, engine, request


def generate(
    model: Model,
    prompts: Sequence[str | Sequence[int]],
    options: Options | Sequence[Options] = DEFAULTS,
    *,
    tree: str | Tree | None = None,
    acceptance: str = "auto",
) -> list[Result]:
    """Decode a batch of prompts with draft heads, each to its end.

    Args:
      model: from `load`.
      prompts: texts or lists of token ids; rows may differ in length.
      options: one for all, or one per prompt.
      tree: the draft tree, or its name as for `--tree`; "none" is plain decoding, and by
        default it is the model's choice for this number of prompts (`Model.tree_at`).
      acceptance: "auto", "greedy", "sampled", "rejection" or "typical"; "auto" is lossless.

    Returns: one result per prompt, in order.

    Raises:
      UserError: as `Model.generate`.
    """
    return model.generate(prompts, options, tree=tree, acceptance=acceptance)
