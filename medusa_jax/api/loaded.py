"""A loaded backbone with its draft heads: parameters, default trees, engines, requests."""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax

from medusa_jax.api.form import Form
from medusa_jax.api.loaded_drafter import LoadedDrafter
from medusa_jax.api.prompts import Prompt, check_tokens, ends_of, prompt_ids, request_of
from medusa_jax.api.results import Options
from medusa_jax.api.tree_choice import TreeChoice, drafted_by
from medusa_jax.arch import LlamaConfig
from medusa_jax.decoding.acceptance import RULES
from medusa_jax.decoding.request import DecodeRequest
from medusa_jax.decoding.state import Engine
from medusa_jax.errors import UserError, between, one_of
from medusa_jax.heads.registry import no_drafter
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.convert import decoder
from medusa_jax.sharding import Params
from medusa_jax.text.chat import Message, encode_prompt, stop_ids
from medusa_jax.text.tokenizer import NoTokenizer, Tokenizer
from medusa_jax.tree.tree import Tree
from medusa_jax.typed import checked_arguments, read
from medusa_jax.whole_files import Json

if TYPE_CHECKING:
    from medusa_jax.constraints import Grammars
    from medusa_jax.text.fill import Gap


class LoadedModel:
    """A backbone with draft heads, and the engines and requests that it is decoded with.

    Attributes:
      name: the name or the directory that it was loaded by, for people.
      config: shape of the backbone.
      drafter: the draft heads.
      variables: {"backbone": the backbone's parameters, "heads": the draft heads'}, as
        `model/convert.py` makes them.
      tokenizer: text to ids and back.
      trees: the default draft trees.
      eos_ids: tokens that end a text, unless a request names others.
      storage: the form that kernels are stored in.
      no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and text; 0 bars nothing.
      repetition_penalty: of requests that name none.
      fingerprint: 16 hex digits that tell the backbone's weights from others'; "" if unknown.
      heads_files: as `LoadedDrafter.files`.
      learned: {"heads": parameters to draft with instead of the loaded ones} (`learning/`), or {}.
    """

    def __init__(
        self,
        config: LlamaConfig,
        backbone: Params,
        loaded: LoadedDrafter,
        tokenizer: Tokenizer,
        form: Form,
        mesh: jax.sharding.Mesh,
        trees: TreeChoice | None = None,
        *,
        name: str = "",
        eos_ids: Sequence[int] | None = None,
        no_repeat_ngram_size: int = 0,
        repetition_penalty: float = 1.0,
        fingerprint: str = "",
    ) -> None:
        self.name, self.config, self.tokenizer = name, config, tokenizer
        self.dtype, self.storage, self.mesh = form.dtype, form.storage, mesh
        self.drafter = loaded.drafter
        self.variables = {"backbone": backbone, "heads": loaded.params}
        self.heads_files = loaded.files
        ends = tokenizer.eos_ids if eos_ids is None else eos_ids
        # Elsewhere -1 matches every token.
        self.eos_ids = tuple(sorted(i for i in ends if 0 <= i < config.vocab_size))
        self.llama = decoder(config, form.dtype, mesh, form.storage, form.kernels)
        self.trees = trees or TreeChoice(self.drafter.default_tree)
        self.parse_tree(self.tree)
        self.no_repeat_ngram_size = no_repeat_ngram_size
        self.repetition_penalty = repetition_penalty
        self.fingerprint = fingerprint
        self.learned: Params = {}
        self._wide: Params | None = None

    def __repr__(self) -> str:
        c, dtype = self.config, self.storage.weights or str(self.dtype)
        return (
            f"<Model {self.name}: {c.n_layers} layers of width {c.d_model} in {dtype}, drafts by {self.drafts_by()}, "
            f"{self.tree.n_nodes} nodes>"
        )

    @property
    def has_drafter(self) -> bool:
        """Whether the model has heads, or a drafter that needs none."""
        return self.drafter.name != "none"

    def drafts_by(self, tree: Tree | None = None) -> str:
        """`drafted_by` this drafter (default: the model's tree)."""
        return drafted_by(self.drafter, self.tree if tree is None else tree)

    def text_settings(self, repetition_penalty: float | None) -> Json:
        """The model's settings that its text depends on; a resumed run compares them."""
        return {
            "no_repeat_ngram_size": self.no_repeat_ngram_size,
            "repetition_penalty": repetition_penalty,
            "dtype": str(self.dtype),
            "weights": self.storage.weights or str(self.dtype),
            "activations": self.storage.activations,
            "context": self.config.max_position,
            "platform": jax.default_backend(),
        }

    def lossless(self, acceptance: str) -> bool | str:
        """Whether drafting keeps the text, or with "rejection" its distribution.

        Returns: "bitwise", True (a text may differ at ties) or False.
        """
        one_of("acceptance", acceptance, ("auto", *RULES))
        rule = RULES["greedy" if acceptance == "auto" else acceptance]
        if not rule.lossless:
            return False
        return "bitwise" if self.llama.kernels.bitwise and not rule.by_drafts else True

    def variables_by(self, acceptance: str) -> Params:
        """`variables` for decoding by this rule.

        If the rule's text depends on the drafts and the heads were by default stored narrower than
        the weights, reads the heads again, as wide as the weights, and keeps both. Only other
        rules draft with what was learned.
        """
        if not RULES[acceptance].by_drafts:
            return self.variables | self.learned
        wide = self.storage.of_deciding_drafts
        if self.heads_files is None or wide == self.storage.of_drafts:
            return self.variables
        if self._wide is None:
            _, self._wide = self.heads_files.read(wide)
        return self.variables | {"heads": self._wide}

    @property
    def backbone(self) -> Backbone:
        """The backbone as drafters see it."""
        return Backbone(self.llama, self.variables["backbone"])

    @property
    def tree(self) -> Tree:
        """The default tree, for the `batch` given to `load`."""
        return self.trees.tree

    def tree_at(self, rows: int) -> Tree:
        """The default tree for this number of rows."""
        return self.trees.at(rows)

    def parse_tree(self, spec: str | Tree | None) -> Tree:
        """The tree a `--tree` value names, checked against the loaded heads."""
        spec = read("tree", spec, str | Tree | None)
        tree = self.trees.parse(spec, self.has_drafter)
        self.drafter.check_tree(tree)
        size = self.drafter.heads.draft_vocab
        if tree.max_rank >= (size or self.config.vocab_size):
            whose = f"heads' draft vocabulary of {size}" if size else "vocabulary"
            raise UserError(f"tree rank {tree.max_rank} exceeds the {whose}")
        return tree

    @checked_arguments()
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
        between("logprobs", logprobs or 0, 0, self.config.vocab_size)
        if acceptance == "greedy" and sampled:
            raise UserError("acceptance 'greedy' needs temperature 0")
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

    def conversation(
        self, messages: str | Sequence[Message], options: Options, template: str = ""
    ) -> tuple[list[int], Options]:
        """Token ids of a conversation up to the model's answer, and options for the answer.

        Args:
          messages: turns with "role" and "content", the last one the user's; or that turn's text.
          template: a shipped chat template, "" for the tokenizer's own.

        Raises:
          UserError: malformed messages, or no such template.
        """
        if not isinstance(messages, Iterable):
            raise UserError("a conversation is text or a list of messages")
        options, template = (
            read("options", options, Options),
            read("template", template, str),
        )
        turns = messages if isinstance(messages, str) else list(messages)
        ids = encode_prompt(self.tokenizer, turns, template)
        return ids, self.ending_turns(options, template)

    def ending_turns(self, options: Options, template: str) -> Options:
        """Options whose text ends where the chat template ends a turn, unless they name EOS ids."""
        if options.eos_ids is not None:
            return options
        return self._ending(options, stop_ids(self.tokenizer, template))

    def middle(self, gap: "Gap", options: Options) -> tuple[list[int], Options]:
        """Token ids of a prompt to fill a gap, and options for its text.

        Raises:
          UserError: the tokenizer has no tokens for it.
        """
        from medusa_jax.text.fill import fill_of  # here: few requests have gaps

        return fill_of(self.tokenizer).prompt(gap), self.ending_middles(options)

    def ending_middles(self, options: Options) -> Options:
        """Options whose text ends at the end of a middle, unless they name EOS ids."""
        from medusa_jax.text.fill import fill_of

        if options.eos_ids is not None:
            return options
        return self._ending(options, fill_of(self.tokenizer).ends)

    def _ending(self, options: Options, ends: Iterable[int]) -> Options:
        return dataclasses.replace(options, eos_ids=tuple(sorted({*self.eos_ids, *ends})))

    def request(
        self,
        prompts: Sequence[Prompt],
        options: Sequence[Options],
        ids: Sequence[int] | None = None,
    ) -> DecodeRequest:
        """Prompts and per-row options in the decode loop's form.

        Args:
          ids: request ids, which decide the noise together with the seed; by default 0, 1, ...

        Raises:
          UserError: a prompt that leaves no room in the context, or EOS ids outside the vocabulary.
        """
        if isinstance(self.tokenizer, NoTokenizer) and any(o.stop for o in options):
            raise self.tokenizer.missing("stop strings cannot be found")
        token_ids = [self.encode(p) for p in prompts]
        options = [o.with_penalty(self.repetition_penalty) for o in options]
        # A turn may end with a token that only the tokenizer has.
        size = max(self.config.vocab_size, self.tokenizer.vocab_size)
        for one in options:
            check_tokens("eos_ids", one.eos_ids or (), size)
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
