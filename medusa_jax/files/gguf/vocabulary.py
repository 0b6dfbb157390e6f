"""Convert GGUF metadata to a tokenizer in Hugging Face form.

A file contains the vocabulary, merges or scores, and the name of a rule that splits text before merging
(`tokenizer.ggml.pre`). Each name selects the rule of its models' published tokenizer.json.
"""

from collections import defaultdict
from dataclasses import dataclass
from math import inf
from typing import Any

from medusa_jax.console import inform
from medusa_jax.errors import UserError, library_errors
from medusa_jax.files.gguf.reader import GGUFFile
from medusa_jax.typed import read

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
# Most characters of a token. Published ones have up to 256; time is quadratic in it.
LONGEST_TOKEN = 1024


@dataclass(frozen=True)
class Splitting:
    """A rule that splits text into pieces; merges stay within a piece.

    Attributes:
      patterns: regular expressions; the matches of each, and the text between them, are split further by the next.
      normal_form: characters are composed (Unicode NFC) first.
      whole_words: a piece that is a token is not split by merges.
      adds_bos: whether texts begin with the BOS if the file does not say.
    """

    patterns: tuple[str, ...]
    normal_form: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Words with one character before them, numbers, punctuation, line ends, other blanks.
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_BEFORE, _SMALL = r"[^\r\n\p{L}\p{N}]?", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LARGE = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CASED = f"{_BEFORE}{_LARGE}*{_SMALL}+|{_BEFORE}{_LARGE}+{_SMALL}*"
_CASED_ENGLISH = (
    f"{_BEFORE}{_LARGE}*{_SMALL}+{_ENGLISH}?|{_BEFORE}{_LARGE}+{_SMALL}*{_ENGLISH}?"
)
_REST_OF_CASED = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_HAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters of two cases in the Unicode of its time, without some scripts.
_CASED_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2d\ua790-\ua7fa"
    r"\uab30-\uab68\x{10570}-\x{105bc}\x{16e40}-\x{1e8ff}]]"
)
_MARKS = r"!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_AFTER_MARK = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_V3 = (
    rf"{_AFTER_MARK}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|"
    rf"{_BLANKS}"
)

LLAMA3 = Splitting((_LLAMA3,), whole_words=True, adds_bos=True)
_SPLITTINGS = {
    "gpt-2 phi-2 gigachat a.x-4.0 mellum trillion granite-docling": Splitting((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Splitting(
        (r"\p{N}", _GPT2)
    ),
    "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0": LLAMA3,
    "smaug-bpe dbrx chatglm-bpe": Splitting((_LLAMA3,)),
    "glm4": Splitting((_LLAMA3,), whole_words=True),
    "qwen2 deepseek-r1-qwen": Splitting((_QWEN2,), normal_form=True),
    "megrez kormo stablelm2": Splitting((_QWEN2,)),
    "tekken": Splitting(
        (rf"{_CASED}|\p{{N}}|{_REST_OF_CASED}",), whole_words=True, adds_bos=True
    ),
    "gpt-4o llama4 kanana2": Splitting(
        (rf"{_CASED_ENGLISH}|\p{{N}}{{1,3}}|{_REST_OF_CASED}",)
    ),
    "deepseek-llm": Splitting(
        (r"[\r\n]", rf"\s?{_CASED_LETTERS}+", rf"\s?[{_MARKS}]+", r"\s+$", _HAN, r"\p{N}+")
    ),
    "deepseek-coder": Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "deepseek-v3 hunyuan-dense": Splitting(
        (r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _V3)
    ),
    "seed-coder": Splitting((rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)),
    "viking": Splitting(
        (r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}")
    ),
    "minicpm5": Splitting((r"\p{N}{1,3}", rf"{_WORDS}|\p{{N}}+|{_REST}"), whole_words=True),
    # Also for files without a name.
    "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
SPLITTINGS = {name: s for names, s in _SPLITTINGS.items() for name in names.split()}

SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Of filling in the middle (`text/fill_tokens.py`), with the names in older files.
FILL_TOKENS = {
    "prefix_token": ("fim_pre_token_id", "prefix_token_id"),
    "suffix_token": ("fim_suf_token_id", "suffix_token_id"),
    "middle_token": ("fim_mid_token_id", "middle_token_id"),
    "fill_pad_token": ("fim_pad_token_id",),
    "repository_token": ("fim_rep_token_id",),
    "file_token": ("fim_sep_token_id",),
}
# Keys of the tokens that end a text, a turn, a message to a tool or an infill.
ENDS = (
    *("eos_token_id", "eot_token_id", "eom_token_id"),
    *("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id"),
)
# Tokens that end a text in llama.cpp, of any type in the file (`special_eog_ids` in llama-vocab.cpp).
_END_TEXTS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s>
    <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>
    <\uff5cend\u2581of\u2581sentence\uff5c> [e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|>
    <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
END_TEXTS = frozenset(_END_TEXTS.split())
# With one of these pairs <|end|> ends a part of a turn.
END_OF_PART = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
# llama.cpp's ids if a sentencepiece vocabulary does not name them.
SENTENCEPIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2}


class UnknownTokenizer(UserError):
    """A tokenizer that is not supported, in a file that may be sound."""


def token_texts(file: GGUFFile) -> list[str]:
    """The vocabulary, by id; [] if there is none."""
    return file.items("tokenizer.ggml.tokens", str, [])


def build_tokenizer(file: GGUFFile) -> Any:
    """The file's tokenizer as a `tokenizers.Tokenizer`.

    Raises:
      UnknownTokenizer: there is none, or one of an unknown kind or splitting.
      UserError: parts are missing or do not fit together.
    """
    import tokenizers

    tokens = token_texts(file)
    kinds = _by_token(file, "token_type", int, tokens, [NORMAL] * len(tokens))
    kinds = [CONTROL if t in END_TEXTS else kind for t, kind in zip(tokens, kinds)]
    if (longest := max(map(len, tokens), default=0)) > LONGEST_TOKEN:
        raise UserError(f"{file.file} is damaged: a token has {longest} characters")
    model = file.text("tokenizer.ggml.model", "none") if tokens else "none"
    if model not in ("gpt2", "llama"):
        raise UnknownTokenizer(
            f"{file.file}: tokenizer kind {model!r} is not supported (there are: gpt2, llama)"
        )
    if model == "gpt2" and not file.values.get("tokenizer.ggml.pre"):
        inform(
            f"{file.file} does not say how its tokenizer splits text: as llama.cpp by default"
        )
    with library_errors(f"{file.file} is damaged: its tokenizer does not fit together"):
        if model == "gpt2":
            backend = _byte_level(file, tokens, _splitting(file))
        else:
            backend = _sentencepiece(file, tokens, kinds)
        for kind, special in ((UNKNOWN, True), (CONTROL, True), (USER_DEFINED, False)):
            backend.add_tokens(
                [
                    tokenizers.AddedToken(token, normalized=False, special=special)
                    for token, its_kind in zip(tokens, kinds)
                    if its_kind == kind and token
                ]
            )
    return backend


def _by_token(
    file: GGUFFile, name: str, kind: type, tokens: list[str], default: list | None = None
) -> list:
    """A list of the metadata with an entry for each token."""
    values = file.items(f"tokenizer.ggml.{name}", kind, default)
    if len(values) != len(tokens):
        raise UserError(
            f"{file.file} is damaged: {len(tokens)} tokens and the {name} of {len(values)}"
        )
    return values


def tokenizer_settings(file: GGUFFile) -> dict[str, Any]:
    """`tokenizer_config.json`: special tokens, BOS, chat template."""
    tokens = token_texts(file)
    kinds = file.items("tokenizer.ggml.token_type", int, [NORMAL] * len(tokens))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in SPECIAL_TOKENS.items():
        number = _token_id(file, key, len(tokens))
        # A name makes a token special, and texts are padded with a word in some files.
        if number is not None and (
            name == "eos_token" or kinds[number] in (UNKNOWN, CONTROL)
        ):
            settings[name] = tokens[number]
    for name, fill_keys in FILL_TOKENS.items():
        numbers = (_token_id(file, key, len(tokens)) for key in fill_keys)
        if (number := next((n for n in numbers if n is not None), None)) is not None:
            settings[name] = tokens[number]
    sentencepiece = file.text("tokenizer.ggml.model") == "llama"
    adds_bos = sentencepiece or _splitting(file).adds_bos
    settings["add_bos_token"] = bool(
        file.values.get("tokenizer.ggml.add_bos_token", adds_bos)
    )
    key = "tokenizer.chat_template"
    keys = {"default": key} | {n: f"{key}.{n}" for n in file.items(f"{key}s", str, [])}
    sources = {name: file.text(key, "") for name, key in keys.items()}
    templates = [{"name": n, "template": source} for n, source in sources.items() if source]
    return settings | ({"chat_template": templates} if templates else {})


def special_ids(file: GGUFFile) -> dict[str, Any]:
    """`bos_token_id` and `eos_token_id` as config.json and generation_config.json have them."""
    tokens = token_texts(file)
    size, end_texts = len(tokens), END_TEXTS.intersection(tokens)
    if any(pair <= end_texts for pair in END_OF_PART):
        end_texts -= {"<|end|>"}
    key_ids = {_token_id(file, key, size) for key in ENDS} - {None}
    ends = key_ids | {number for number, token in enumerate(tokens) if token in end_texts}
    return {
        "bos_token_id": _token_id(file, "bos_token_id", size),
        "eos_token_id": sorted(ends) or None,
    }


def _token_id(file: GGUFFile, key: str, size: int) -> int | None:
    """A token id of the metadata; without one, and for one that no token has, llama.cpp's or None."""
    name = f"tokenizer.ggml.{key}"
    number: int = read(f"{file.file}: {name}", file.values.get(name, -1), int)
    if not 0 <= number < size and file.values.get("tokenizer.ggml.model") == "llama":
        number = SENTENCEPIECE_IDS.get(key, size)
    return number if 0 <= number < size else None


def _splitting(file: GGUFFile) -> Splitting:
    """The rule that the file names; raises UnknownTokenizer if unknown."""
    name = file.text("tokenizer.ggml.pre", "") or "default"
    if name not in SPLITTINGS:
        raise UnknownTokenizer(
            f"{file.file}: pre-tokenizer {name!r} is not supported (there are: "
            f"{', '.join(SPLITTINGS)})"
        )
    return SPLITTINGS[name]


def _byte_level(file: GGUFFile, tokens: list[str], splitting: Splitting) -> Any:
    """Byte-level byte-pair encoding, as in GPT-2."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(m.split(" ", 1)) for m in file.items("tokenizer.ggml.merges", str)]
    model = models.BPE(_ids(tokens), merges, ignore_merges=splitting.whole_words)
    backend = Tokenizer(model)
    if splitting.normal_form:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GGUFFile, tokens: list[str], kinds: list[int]) -> Any:
    """SentencePiece's byte-pair encoding, which first merges the neighbours with the best score.

    A blank is "▁", one precedes a text, and characters without a token become bytes.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _by_token(file, "scores", float, tokens, [0.0] * len(tokens))
    normal = {t: s for t, s, kind in zip(tokens, scores, kinds) if kind == NORMAL}
    merges = sorted(
        (-score, token[:i], token[i:])
        for token, score in normal.items()
        for i in range(1, len(token))
        if token[:i] in normal and token[i:] in normal
    )
    _refuse_ties(file, merges)
    unk_id = _token_id(file, "unknown_token_id", len(tokens))
    model = models.BPE(
        _ids(tokens),
        [(left, right) for _, left, right in merges],
        unk_token=None if unk_id is None else tokens[unk_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    prefixed = file.values.get("tokenizer.ggml.add_space_prefix", True)
    blanks = normalizers.Replace(" ", "▁")
    steps = [normalizers.Prepend("▁"), blanks] if prefixed else [blanks]
    backend.normalizer = normalizers.Sequence(steps)
    text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(text + strip)
    return backend


def _refuse_ties(file: GGUFFile, merges: list[tuple[float, str, str]]) -> None:
    """Refuse merges of equal scores that compete: sentencepiece takes the leftmost in a text first, ranks cannot.

    Two compete if one's right part is the other's left part, or if what one makes is a part of one that comes no later.
    """
    made, used = defaultdict[float, set[str]](set), dict[str, float]()
    for loss, left, right in reversed(merges):
        made[loss].add(left + right)
        used[left] = used[right] = loss
    tied = [merge for merge in merges if len(made[merge[0]]) > 1]
    begun = defaultdict[tuple[float, str], set[str]](set)
    for loss, left, right in tied:
        begun[loss, left].add(left + right)
    for loss, left, right in tied:
        token = left + right
        if used.get(token, inf) <= loss or begun.get((loss, right), {token}) != {token}:
            raise UnknownTokenizer(
                f"{file.file}: tokens with equal scores, or none, that compete in a text, such as {token!r}, are not "
                "supported"
            )


def _ids(tokens: list[str]) -> dict[str, int]:
    """Token -> id; of equal tokens the first counts."""
    return {token: number for number, token in reversed([*enumerate(tokens)])}
