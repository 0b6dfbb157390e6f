"""The calls of a loaded model: generate, stream, chat."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import cached_property, partial
from typing import Any, overload

import jax

from medusa_jax.api.compiling import Compiling
from medusa_jax.api.loaded import LoadedModel
from medusa_jax.api.prompts import Prompt, is_message
from medusa_jax.api.results import DEFAULTS, Options, Result, results_of
from medusa_jax.api.text_stream import Chunk, OnEnd, OnTokens, TextStream, stream_rows
from medusa_jax.api.tree_choice import drafted_by, text_is_free
from medusa_jax.decoding import generation
from medusa_jax.decoding.penalties import any_penalties
from medusa_jax.decoding.request import DecodeRequest, sizes_of
from medusa_jax.decoding.state import Engine
from medusa_jax.errors import UserError
from medusa_jax.text.chat import Message
from medusa_jax.tree.tree import Tree
from medusa_jax.typed import checked_arguments

OPTIONS = [field.name for field in dataclasses.fields(Options)]


class Model(LoadedModel):
    """A backbone with draft heads, ready to decode. Made by `load`."""

    @cached_property
    def _warm(self) -> set[tuple[object, ...]]:
        """Shapes of the requests whose programs are compiled."""
        return set()

    def _shape(self, engine: Engine, request: DecodeRequest) -> tuple[object, ...]:
        """What decides which program a request runs."""
        most_ends = max(map(len, request.ends or ()), default=0)
        present = any_penalties(request.penalties), request.guides is None
        return engine, len(request.prompts), *sizes_of(engine, request), most_ends, *present

    def _compiling(self, engine: Engine, request: DecodeRequest) -> Compiling:
        """Compiles the programs of a request, unless they are compiled already."""
        shape = self._shape(engine, request)
        if shape in self._warm:
            return Compiling()
        warm_up = generation.warm_up
        if request.guides is not None:
            from medusa_jax.decoding import constrained

            warm_up = constrained.warm_up
        given = engine, self.variables_by(engine.acceptance), request
        return Compiling(partial(warm_up, *given), partial(self._warm.add, shape))

    @checked_arguments(OPTIONS, types=False)
    def compile(
        self,
        prompts: Sequence[Prompt],
        options: Options | Sequence[Options] = DEFAULTS,
        ids: Sequence[int] | None = None,
        *,
        tree: str | Tree | None = None,
        acceptance: str = "auto",
    ) -> float:
        """Compile what `generate` and `stream` run for these prompts; returns the seconds."""
        _, engine, request = self.plan(prompts, options, ids, tree, acceptance)
        compiling = self._compiling(engine, request)
        compiling.steps()
        return compiling.seconds

    @checked_arguments(OPTIONS, types=False)
    def generate(
        self,
        prompts: Sequence[Prompt],
        options: Options | Sequence[Options] = DEFAULTS,
        ids: Sequence[int] | None = None,
        watch: OnTokens | None = None,
        ended: OnEnd | None = None,
        *,
        tree: str | Tree | None = None,
        acceptance: str = "auto",
    ) -> list[Result]:
        """Decode a batch of prompts to their ends.

        Args:
          prompts: texts or lists of token ids; rows may differ in length.
          options: one for all, or one per prompt.
          ids: request ids, by default 0, 1, ...: with the seed they determine every draw, so a
            prompt with the same id gets the same text in any batch and slot.
          watch: called repeatedly with the number of new tokens of every row so far.
          ended: called with the index and the result of each prompt soon after its end.
          tree: the draft tree, or its name as for `--tree`; "none" is plain decoding, and by default it is the
            model's choice for this number of prompts (`tree_at`).
          acceptance: "auto", "greedy", "sampled", "rejection" or "typical"; "auto" is lossless.

        Returns: one result per prompt, in order.

        Raises:
          UserError: a prompt that leaves no room in the context or has ids outside the
            vocabulary, a tree that the heads cannot fill, incompatible options.
        """
        rows, engine, request = self.plan(prompts, options, ids, tree, acceptance)
        compiling = self._compiling(engine, request)
        variables = self.variables_by(engine.acceptance)
        if watch or ended or request.guides or any(o.stop for o in rows):
            # The host reads along.
            parts = self.tokenizer, rows, engine, variables, request
            *_, (_, results) = stream_rows(*parts, compiling, watch, ended)
            assert results is not None
            return results
        compiling.steps()
        start = time.perf_counter()
        begun = jax.block_until_ready(generation.begin(engine, variables, request))
        prefilled = time.perf_counter()
        chunks = generation.stream(engine, variables, request, *begun, read_along=False)
        *_, progress = chunks
        end = time.perf_counter()
        seconds = (prefilled - start, end - prefilled, compiling.seconds)
        return results_of(self.tokenizer, rows, request, progress, seconds)

    @overload
    def stream(  # type: ignore[overload-overlap]  # text is a sequence of text as well
        self,
        prompts: str | Sequence[Message],
        options: Options = DEFAULTS,
        ids: Sequence[int] | None = None,
        *,
        tree: str | Tree | None = None,
        acceptance: str = "auto",
    ) -> TextStream: ...

    @overload
    def stream(
        self,
        prompts: Sequence[Prompt],
        options: Options | Sequence[Options] = DEFAULTS,
        ids: Sequence[int] | None = None,
        *,
        tree: str | Tree | None = None,
        acceptance: str = "auto",
    ) -> Iterator[Chunk]: ...

    @checked_arguments(OPTIONS, types=False)
    def stream(
        self,
        prompts: Any,
        options: Any = DEFAULTS,
        ids: Sequence[int] | None = None,
        *,
        tree: str | Tree | None = None,
        acceptance: str = "auto",
    ) -> TextStream | Iterator[Chunk]:
        """Decode a few steps at a time, yielding the new text.

        Args:
          prompts: as for `generate`; or one text or conversation, as for `chat`.
          options: one for all, or one per prompt.
          ids: as for `generate`.
          tree: as for `generate`.
          acceptance: as for `generate`.

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
            one, options = self.conversation(prompts, options)
        else:
            return self._stream(prompts, options, ids, tree, acceptance)
        return TextStream(self._stream([one], options, ids, tree, acceptance))

    @checked_arguments(OPTIONS, types=False)
    def chat(
        self,
        messages: str | Sequence[Message],
        options: Options = DEFAULTS,
        *,
        template: str = "",
        tree: str | Tree | None = None,
        acceptance: str = "auto",
    ) -> Result:
        """Answer a conversation: the reply ends where the chat template ends a turn.

        Args:
          messages: turns such as {"role": "user", "content": "Hi"} (or "system", "assistant"), the
            last one the user's; or the text of a single turn.
          template: a shipped chat template (`vicuna`, `llama3`, ...); "" is the tokenizer's own.
          tree: as for `generate`.
          acceptance: as for `generate`.

        Raises:
          UserError: as `generate`; malformed messages, or the tokenizer has no template.

        Example:
          print(model.chat([{"role": "user", "content": "Name a colour."}]).text)
        """
        prompt, options = self.conversation(messages, options, template)
        return self.generate([prompt], options, tree=tree, acceptance=acceptance)[0]

    @checked_arguments(OPTIONS)
    def complete(
        self,
        prefix: str,
        suffix: str,
        options: Options = DEFAULTS,
        *,
        tree: str | Tree | None = None,
        acceptance: str = "auto",
    ) -> Result:
        """Fill in the middle between two texts; a `UserError` if the model has no tokens for it.

        Args:
          tree: as for `generate`.
          acceptance: as for `generate`.

        Example:
          print(model.complete("def add(a, b):\n    return ", "\n").text)
        """
        from medusa_jax.text.fill import Gap  # here: few requests have gaps

        prompt, options = self.middle(Gap(prefix, suffix), options)
        return self.generate([prompt], options, tree=tree, acceptance=acceptance)[0]

    def _stream(
        self, prompts: Any, options: Any, ids: Any, tree: Any, acceptance: str
    ) -> Iterator[Chunk]:
        """Compile and decode when the first chunk is requested."""
        rows, engine, request = self.plan(prompts, options, ids, tree, acceptance)
        parts = self.tokenizer, rows, engine, self.variables_by(engine.acceptance), request
        yield from stream_rows(*parts, self._compiling(engine, request))

    @checked_arguments()
    def plan(
        self,
        prompts: Any,
        options: Options | Sequence[Options],
        ids: Sequence[int] | None = None,
        tree: str | Tree | None = None,
        acceptance: str = "auto",
    ) -> tuple[list[Options], Engine, DecodeRequest]:
        """The options of each row, the engine and the request of a call of `generate`.

        Raises:
          UserError: as `generate`.
        """
        if isinstance(prompts, str | Set) or not isinstance(prompts, Iterable):
            raise UserError("prompts is a list: give [prompt] for a single one")
        # A message is one prompt, which `encode` refuses.
        prompts = [prompts] if is_message(prompts) else list(prompts)
        if not prompts:
            raise UserError("the list of prompts is empty")
        rows = [options] * len(prompts) if isinstance(options, Options) else [*options]
        for values, name in ((rows, "options"), (rows if ids is None else ids, "ids")):
            if len(values) != len(prompts):
                raise UserError(f"{len(prompts)} prompts but {len(values)} {name}")
        request = self.request(prompts, rows, ids)
        engine = self._engine_for(rows, tree, acceptance)
        if acceptance == "auto" and engine.acceptance == "greedy":
            # A program of sampled rows gives greedy ones the same text: do not compile another.
            sampled = self._engine_for(rows, tree, "sampled")
            shapes = [self._shape(one, request) in self._warm for one in (engine, sampled)]
            engine = sampled if shapes == [False, True] else engine
        if request.guides is not None:
            from medusa_jax.decoding.constrained import with_runs

            # Where steps may be plain, heads cost more than they give in constrained text.
            engine = with_runs(engine, not (self.trees.chooses and tree in (None, "auto")))
        if engine.gated:
            request.gate = self.trees.gate(engine, len(rows))
            request.costs = self.trees.costs(engine)
        trees = engine.gated or (engine.tree,)
        request.drafts = [(t.n_nodes, drafted_by(engine.drafter, t)) for t in trees]
        return rows, engine, request

    def _engine_for(
        self, rows: Sequence[Options], tree: str | Tree | None, acceptance: str
    ) -> Engine:
        """The engine for rows with these options; without a tree it may choose among sizes."""
        sampled = any(o.temperature > 0 for o in rows)
        logprobs = max((o.logprobs for o in rows if o.logprobs is not None), default=None)
        if not self.has_drafter or tree not in (None, "auto"):
            return self.engine(tree, acceptance, sampled, logprobs)
        engine = self.engine(self.tree_at(len(rows)), acceptance, sampled, logprobs)
        # Constraints need the host in every step.
        chooses = self.trees.chooses and not any(o.constraint for o in rows)
        if chooses and text_is_free(engine, self.dtype):
            engine = self.trees.gated(self.drafter, engine)
        return engine
