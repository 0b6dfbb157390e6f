"""Tokenizers: text to ids and back, and incremental decoding."""

import glob
import os
from collections.abc import Iterable, Sequence
from typing import Any

from medusa_jax.errors import UserError, library_errors
from medusa_jax.files.families import model_fields
from medusa_jax.files.hub import TEMPLATES_FOLDER, TOKENIZER_FILES, resolve
from medusa_jax.files.json_files import REFUSAL, optional_json
from medusa_jax.text.fill_tokens import fill_texts as find_fill_texts
from medusa_jax.text.growth import check_growth
from medusa_jax.text.named_tokens import NamedTokens
from medusa_jax.typed import Fields
from medusa_jax.whole_files import Json, read_text

BROKEN = "\ufffd"
# Files from which transformers builds a tokenizer without tokenizer.json.
SOURCES = ("tokenizer.model", "vocab.json", "vocab.txt")
NO_DEFAULT = "{{ raise_exception('there are several by name and no default') }}"
# Special tokens that chat templates read as "" if there are none.
SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token")
# Longer texts take the library's batch call, which releases the GIL: encoding them can take seconds or more.
LONG = 4096
# Ids that a `StreamDecoder` holds at most, and those it keeps when it drops the others.
WINDOW, TAIL = 48, 12


class TurnPrompt(list[int]):
    """A prompt after which a turn begins. The turn is decoded like the beginning of a text."""


class Tokenizer:
    """A `tokenizers` tokenizer with the special tokens of a model directory.

    Attributes:
      bos_id: the id that starts a text, or None.
      prefix: ids that plain text starts with (Llama: the BOS; GLM: two tokens; Qwen: none).
      eos_ids: ids that end a text or a turn; chat models often have several.
      vocab_size: number of ids, added tokens included. A model may have more embeddings.
      chat_template: the Jinja source from the model directory, or ""; of several by name the default.
      named_templates: the others by name, such as "tool_use".
      special_texts: {"bos_token": "<s>", ...}: the tokens that the files name.
      fill_texts: of them, or known by their spelling: tokens for filling in the middle (`fill_tokens.py`).
      special_ids: ids that `decode` skips by default.
      origin: the model's name in its metadata, or "".
      byte_ids: ids of the byte tokens <0x00> ... <0xFF> of a byte-fallback vocabulary.
    """

    def __init__(
        self,
        backend: Any,
        *,
        bos_id: int | None = None,
        adds_bos: bool | None = None,
        eos_ids: Iterable[int] = (),
        chat_templates: dict[str, str] | None = None,
        special_texts: dict[str, str] | None = None,
        origin: str = "",
    ) -> None:
        check_growth(backend)
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_id = bos_id
        letter = encode_text(backend, "a", special=True)
        self.prefix = tuple(letter.ids[: [*letter.special_tokens_mask, 0].index(0)])
        if adds_bos is False:
            self.prefix = tuple(i for i in self.prefix if i != bos_id)
        elif adds_bos and not self.prefix and bos_id is not None:
            self.prefix = (bos_id,)
        self.special_texts, self.origin = special_texts or {}, origin
        self.fill_texts = find_fill_texts(backend, self.special_texts)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_ids = frozenset(i for i in eos_ids if 0 <= i < self.vocab_size)
        templates = dict(chat_templates or {})
        self.chat_template = templates.pop("default", NO_DEFAULT if templates else "")
        self.named_templates = templates
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        bytes_ = [backend.token_to_id(f"<0x{b:02X}>") for b in range(256)]
        falls_back = (
            None not in bytes_ and backend.decode([bytes_[b] for b in b"\xc3\xa9"]) == "é"
        )
        self.byte_ids = frozenset(bytes_ if falls_back else ())
        self._newline = bytes_[ord("\n")]

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        """Ids of `text`; special tokens written out in it are recognised.

        With `add_bos` the tokenizer's `prefix` comes first.

        Raises:
          UserError: the text is not valid Unicode.
        """
        ids = encode_text(self.backend, text).ids
        return [*self.prefix, *ids] if add_bos else ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of `text` and their character ranges [start, end)."""
        encoding = encode_text(self.backend, text)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of the ids; invalid UTF-8 becomes U+FFFD, unknown ids are skipped."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def decode_after(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """The text that new ids add to a prompt's text, without an incomplete last character."""
        context = self.context(prompt)
        text = self.decode([*context, *ids]).rstrip(BROKEN)
        return text[len(self.decode(context)) :]

    def context(self, prompt: Sequence[int]) -> list[int]:
        """The token of a prompt to decode new tokens with; [] if a text or a turn begins after it.

        Some decoders drop the first space of a text, after special tokens too. A part of a character is no context:
        new tokens could change its text.
        """
        if isinstance(prompt, TurnPrompt):
            return []
        for i in reversed(prompt):
            if not self.skips(i):
                # A newline's byte instead of others: it is no part of a character.
                one = self._newline if i in self.byte_ids else i
                if BROKEN not in self.decode([one]):
                    return [one]
        return []

    def skips(self, token_id: int) -> bool:
        """Whether decoding skips an id: a special token's, or one without a token."""
        return token_id in self.special_ids or self.backend.id_to_token(token_id) is None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary, or None."""
        return self.backend.token_to_id(token)


def encode_text(backend: Any, text: str, special: bool = False) -> Any:
    """The library's encoding of a text.

    Args:
      special: with the special tokens that the tokenizer puts around it.

    Raises:
      UserError: the text is not valid Unicode, or the library's Rust code panics, as for a pattern of the
        pre-tokenizer that backtracks without end.
    """
    with library_errors("the tokenizer cannot read a text"):
        try:
            if len(text) > LONG:
                return backend.encode_batch([text], add_special_tokens=special)[0]
            return backend.encode(text, add_special_tokens=special)
        except TypeError as error:  # raised for lone surrogates
            problem = "a text has an unpaired surrogate, which is not a valid character"
            raise UserError(problem) from error


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a model directory or hub id.

    `tokenizer.json` is read directly; `tokenizer.model` (sentencepiece) is read by transformers, which takes a
    second longer. Other tokens come from the files of `named_tokens.py`, the ids of BOS and EOS also from config.json
    and generation_config.json.

    Raises:
      UserError: no tokenizer, or an unreadable one.
    """
    directory = resolve(path, TOKENIZER_FILES)
    tokens = NamedTokens(directory)
    backend, settings = _backend(directory, tokens), tokens.settings

    def id_of(name: str) -> int | None:
        token = tokens.texts.get(name)
        return backend.token_to_id(token) if token else None

    model = model_fields(directory)
    Fields(directory, settings).expect({"fast_tokenizer_files": (["tokenizer.json"], [])})
    bos_ids = _ids(id_of("bos_token"), model.get("vocab_size"))
    if "bos_token" not in settings:
        # Only if the tokenizer does not specify it: Qwen's configs name a BOS that is never used.
        bos_ids = _ids(model.get("bos_token_id"), backend.get_vocab_size())
    bos_id = min(bos_ids, default=None)
    eos_ids = _ids(id_of("eos_token")) | declared_eos_ids(directory)
    special = dict(tokens.texts)
    if bos_id is not None:
        special.setdefault("bos_token", backend.id_to_token(bos_id) or "")
    return Tokenizer(
        backend,
        bos_id=bos_id,
        adds_bos=settings.get("add_bos_token"),
        eos_ids=eos_ids,
        chat_templates=_chat_templates(directory, settings),
        special_texts=special,
        origin=str(model.get("_name_or_path", "")),
    )


class NoTokenizer(Tokenizer):
    """For models without a tokenizer: prompts are token ids, texts are empty.

    Attributes:
      directory: of the model, for messages.
    """

    def __init__(self, directory: str) -> None:
        self.directory, self.backend = directory, None
        self.bos_id, self.prefix, self.vocab_size = None, (), 0
        self.chat_template, self.named_templates, self.special_texts = "", {}, {}
        self.fill_texts: dict[str, str] = {}
        self.origin = ""
        self.eos_ids = self.special_ids = self.byte_ids = frozenset()

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        raise self.missing("give prompts as token ids")

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        raise self.missing("text cannot be read")

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return ""

    def skips(self, token_id: int) -> bool:
        return False  # a stream need not wait for further ids

    def token_to_id(self, token: str) -> int | None:
        return None

    def missing(self, advice: str) -> UserError:
        """The error for an operation that needs a tokenizer."""
        return UserError(
            f"{self.directory} holds no tokenizer (tokenizer.json or tokenizer.model): {advice}; "
            "to have one, put its files there or name it with --tokenizer (decode, serve)"
        )


def has_tokenizer(directory: str) -> bool:
    """Whether a local directory holds a tokenizer's files, readable or not."""
    names = ("tokenizer.json", *SOURCES, REFUSAL)
    return any(os.path.isfile(os.path.join(directory, name)) for name in names)


def declared_eos_ids(directory: str) -> set[int]:
    """EOS ids of config.json and generation_config.json that the vocabulary has."""
    model = model_fields(directory)
    generation = optional_json(os.path.join(directory, "generation_config.json"))
    size = model.get("vocab_size")
    return _ids(model.get("eos_token_id"), size) | _ids(
        generation.get("eos_token_id"), size
    )


def _ids(value: object, size: object = None) -> set[int]:
    """The token ids of a field that are below `size`: some files have -1 for none."""
    ids = value if isinstance(value, list) else [value]
    end = size if isinstance(size, int) else 2**31
    return {i for i in ids if type(i) is int and 0 <= i < end}


def _backend(directory: str, tokens: NamedTokens) -> Any:
    file = os.path.join(directory, "tokenizer.json")
    if os.path.isfile(file):
        import tokenizers

        text = read_text(file)
        with library_errors(f"{file} cannot be read"):
            backend = tokenizers.Tokenizer.from_str(text)
            tokens.add_to(backend)
        return backend
    if not has_tokenizer(directory):
        raise UserError(
            f"{directory} holds no tokenizer: looked for tokenizer.json and tokenizer.model"
        )
    if os.path.isfile(file := os.path.join(directory, REFUSAL)):
        raise UserError(f"{read_text(file)}; name another with --tokenizer")
    from medusa_jax.text.sentencepiece_files import read_backend  # imports transformers

    return read_backend(directory)


def _chat_templates(directory: str, settings: Json) -> dict[str, str]:
    """Chat templates by name: those in files, else in tokenizer_config.json, else in a processor's older file."""
    files = {"default": os.path.join(directory, "chat_template.jinja")}
    folder = os.path.join(directory, TEMPLATES_FOLDER)
    for name in sorted(glob.glob("*.jinja", root_dir=folder)):
        files[name.removesuffix(".jinja")] = os.path.join(folder, name)
    templates = {
        name: read_text(file) for name, file in files.items() if os.path.isfile(file)
    }
    if templates:
        return templates
    older = optional_json(os.path.join(directory, "chat_template.json"))
    setting = settings.get("chat_template") or older.get("chat_template")
    if not isinstance(setting, list):
        setting = [{"name": "default", "template": setting}]
    by_name = {
        str(t.get("name")): t.get("template") for t in setting if isinstance(t, dict)
    }
    return {name: source for name, source in by_name.items() if isinstance(source, str)}


class StreamDecoder:
    """Incremental decoding of a growing sequence of ids.

    The joined pieces are `tokenizer.decode_after(prompt, all ids)`. Returned text never changes: incomplete characters
    are held, and so are runs of byte tokens, because a later invalid byte changes how the whole run is decoded.

    Example: with byte tokens for "é" = C3 A9, push([a, C3]) gives "a", push([A9, b]) "éb".
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Recent ids, and how many characters of their text have been returned.
        self._window = tokenizer.context(prompt)
        self._returned = len(tokenizer.decode(self._window))

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; return the text that is now final (often "")."""
        self._window.extend(int(i) for i in ids)
        end, tokenizer = len(self._window), self._tokenizer
        # The text may still change: a run of byte tokens may continue, also across skipped ids.
        while end and (
            self._window[end - 1] in tokenizer.byte_ids
            or tokenizer.skips(self._window[end - 1])
        ):
            end -= 1
        piece = self._take(self._window[:end])
        if end == len(self._window):
            self._drop_old_ids()
        return piece

    def flush(self) -> str:
        """Return the remaining text, without an incomplete character, and reset."""
        piece = self._take(self._window)
        self._window, self._returned = [], 0
        return piece

    def _take(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids).rstrip(BROKEN)
        piece = text[self._returned :]
        self._returned += len(piece)
        return piece

    def _drop_old_ids(self) -> None:
        """Drop old ids, so that the cost of a piece does not grow with the text.

        Only if the remaining ids decode to the end of the returned text and contain a word, since decoders treat
        the first space of a text differently.
        """
        if len(self._window) <= WINDOW:
            return
        text = self._tokenizer.decode(self._window)
        tail = self._tokenizer.decode(self._window[-TAIL:])
        if len(text) == self._returned and tail.strip() and text.endswith(tail):
            self._window, self._returned = self._window[-TAIL:], len(tail)
