"""Tokenizers read as transformers does; streams of text; what tokens cover, in bytes."""

import io
import json
import random
import shutil

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import LLAMA, METASPACE, like_llama
from refusals import refused
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from medusa_jax.text.chat import encode_prompt
from medusa_jax.text.growth import check_growth
from medusa_jax.text.literal_text import literal_text
from medusa_jax.text.token_bytes import TokenBytes
from medusa_jax.text.tokenizer import (
    BROKEN,
    LONG,
    NoTokenizer,
    StreamDecoder,
    Tokenizer,
    TurnPrompt,
    declared_eos_ids,
    load_tokenizer,
)

TEXTS = ["", "Hello", " lead", "a  b\n\tc ", "naïve café", "\n"]
TEXTS += ["日本語と😀👩‍👩‍👧 done", "</s> x"]


@pytest.fixture(scope="module")
def tokenizers_by_kind(sentencepiece_dir, byte_level_dir):
    return {
        "sentencepiece": load_tokenizer(str(sentencepiece_dir)),
        "byte_level": load_tokenizer(str(byte_level_dir)),
    }


@pytest.fixture(params=["sentencepiece", "byte_level"])
def tokenizer(request, tokenizers_by_kind):
    return tokenizers_by_kind[request.param]


def stream(tokenizer, ids, sizes, prompt=()):
    decoder = StreamDecoder(tokenizer, prompt)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(decoder.push(ids[at : at + size]))
        at += size
    pieces.append(decoder.push(ids[at:]))
    return [*pieces, decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_same_ids_as_transformers(tokenizer, text, sentencepiece_dir, byte_level_dir):
    transformers = pytest.importorskip("transformers")
    path = sentencepiece_dir if tokenizer.byte_ids else byte_level_dir
    kind = "LlamaTokenizer" if tokenizer.byte_ids else "PreTrainedTokenizerFast"
    theirs = getattr(transformers, kind).from_pretrained(path)
    assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, add_bos=True) == theirs.encode(text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_special_tokens(tokenizers_by_kind):
    llama2, llama3 = tokenizers_by_kind.values()
    assert (llama2.bos_id, llama2.eos_ids, llama2.prefix) == (1, {2}, (1,))
    assert len(llama2.byte_ids) == 256
    assert (llama3.bos_id, llama3.eos_ids, llama3.prefix) == (0, {1, 2}, (0,))
    assert not llama3.byte_ids
    assert llama3.encode("<|eot_id|>") == [2]
    assert llama3.decode([2, 99]) == llama3.decode([99])
    assert llama3.decode([2], skip_special=False) == "<|eot_id|>"
    assert llama3.decode([llama3.vocab_size + 5, 99]) == llama3.decode([99])


def test_bos_is_not_invented(byte_level_dir, tmp_path):
    """Qwen's config.json names a BOS id, its tokenizer says it has none. Or the model has no embedding for it."""
    backend = json.loads((byte_level_dir / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend | {"post_processor": None}))
    ids = {"bos_token_id": 7, "eos_token_id": 8, "vocab_size": 400}
    (tmp_path / "config.json").write_text(json.dumps(ids))
    for name in (None, "<new>"):
        settings = {"bos_token": name, "add_bos_token": True}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = load_tokenizer(str(tmp_path))
        assert tokenizer.bos_id is None and tokenizer.eos_ids == {8}
        assert tokenizer.encode("x", add_bos=True) == tokenizer.encode("x")


@pytest.mark.parametrize("bos", [None, "<|im_end|>"])
@pytest.mark.parametrize("text", ["Hello you", "a <|eot_id|>"])
def test_text_begins_with_the_prefix_of_its_post_processor(
    text, bos, byte_level_dir, tmp_path
):
    """GLM's texts begin with [gMASK]<sop>; neither is its BOS."""
    transformers = pytest.importorskip("transformers")
    backend = Backend.from_file(str(byte_level_dir / "tokenizer.json"))
    names = ("<|im_start|>", "<|im_end|>")
    template = processors.TemplateProcessing(
        single="<|im_start|>:0 <|im_end|>:0 $A:0",
        special_tokens=[(name, backend.token_to_id(name)) for name in names],
    )
    steps = [processors.ByteLevel(trim_offsets=False), template]
    backend.post_processor = processors.Sequence(steps)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos)
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(str(tmp_path))
    assert ours.encode(text, add_bos=True) == theirs.encode(text)
    literal = theirs.encode(text, split_special_tokens=True)
    assert literal_text(ours).encode(text) == literal


END, TURNS = "<|turn|>", "{{ sep_token }}{{ image_token }}{{ messages[0].content }}"
FLAGS = {"content": END, "special": False, "normalized": False, "__type": "AddedToken"}
FLAGS |= {"lstrip": False, "rstrip": False, "single_word": False}
PLAIN, SPECIAL, STRIPS = FLAGS, FLAGS | {"special": True}, FLAGS | {"lstrip": True}
EXTRA, FURTHER, LISTED = (
    "extra_special_tokens",
    "additional_special_tokens",
    "added_tokens_decoder",
)
# tokenizer_config.json, special_tokens_map.json, added_tokens.json, the token in tokenizer.json.
NAMING = [
    ({"eos_token": END, "cls_token": None}, {}, {}, PLAIN),
    ({EXTRA: [STRIPS | {"special": True}], "image_token": "<x>"}, {}, {}, None),
    ({EXTRA: {"image_token": END}, FURTHER: ["<x>", "<y>"], "sep_token": "<y>"}, {}, {}, None),
    ({"eos_token": "<x>"}, {"eos_token": END, FURTHER: ["<y>"]}, {"<x>": 401, END: 400}, None),
    ({LISTED: {"400": STRIPS}, "eos_token": END}, {"eos_token": "<x>"}, {"<y>": 401}, SPECIAL),
    ({LISTED: {"400": SPECIAL}}, {}, {}, PLAIN),
    ({"eos_token": "ant", "pad_token": "e"}, {}, {}, PLAIN),
]  # fmt: skip


@pytest.mark.parametrize(("config", "older", "added", "token"), NAMING)
def test_tokens_that_only_other_files_name(
    config, older, added, token, byte_level_dir, tmp_path
):
    """Ids, text, streams, ends and messages are as in transformers."""
    transformers = pytest.importorskip("transformers")
    data = json.loads((byte_level_dir / "tokenizer.json").read_text())
    data["added_tokens"] += [{"id": 400} | token] if token else []
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TURNS}
    names = ["tokenizer_config", "tokenizer", "special_tokens_map", "added_tokens"]
    for name, value in zip(names, (config, data, older, added)):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    ours = load_tokenizer(str(tmp_path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.special_texts == theirs.special_tokens_map
    assert ours.eos_ids == {theirs.eos_token_id} - {None}
    text = f"an assistant  {END}e<x><y> {END} b"
    ids = theirs.encode(text, add_special_tokens=False)
    shown = theirs.decode(ids, skip_special_tokens=True)
    assert ours.encode(text) == ids and ours.decode(ids) == shown
    assert "".join(stream(ours, ids, [1] * len(ids))) == shown
    if config.get("eos_token") != "ant":  # theirs refuses a word
        talk, how = [{"role": "user", "content": text}], {"sanitize_control_tokens": True}
        expected = theirs.apply_chat_template(talk, **how)["input_ids"]
        both = encode_prompt(ours, talk), expected
        special, other = ([i for i in ids if i in ours.special_ids] for ids in both)
        assert special == other and ours.decode(both[0]) == ours.decode(both[1])


@pytest.mark.parametrize("name", ["bos_token", "prefix_token"])
def test_names_of_tokens_that_are_no_text(name, byte_level_dir, tmp_path):
    shutil.copy(byte_level_dir / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: "\ud800"}))
    with refused("its files name tokens that cannot be read: .*surrogates not allowed"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("value", [-1, [2, -1], 10**6, [2, 2**40, True, 2.0, None]])
def test_ids_outside_the_vocabulary_are_none(value, byte_level_dir, tmp_path):
    """-1 would match every token, and no text of an id beyond could be looked up."""
    shutil.copytree(byte_level_dir, tmp_path / "copy")
    folder = tmp_path / "copy"
    raw = json.loads((folder / "tokenizer_config.json").read_text())
    kept = {k: v for k, v in raw.items() if k not in ("bos_token", "eos_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    ids = {"bos_token_id": value, "eos_token_id": value}
    (folder / "config.json").write_text(json.dumps(ids | {"vocab_size": 300}))
    (folder / "generation_config.json").write_text(json.dumps(ids))
    inside = {2} if isinstance(value, list) else set()
    assert declared_eos_ids(str(folder)) == inside
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.eos_ids == inside and tokenizer.bos_id == (2 if inside else None)
    whole = {"model_type": "gemma3", "text_config": ids | {"vocab_size": 300}}
    (folder / "config.json").write_text(json.dumps(whole))
    assert declared_eos_ids(str(folder)) == inside


def test_missing_and_broken_tokenizers(tmp_path):
    with refused(r"no tokenizer: looked for tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with refused(r"tokenizer\.json cannot be read"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(?:a+a+)+c"])
def test_a_pattern_that_backtracks_without_end(pattern, tmp_path):
    """The library's Rust code panics, in short texts and long ones, with stand-ins and without."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "<s>": 2}, []))
    backend.add_special_tokens(["<s>"])
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("aab") == [0, 0, 1]
    text = "a" * 60 + "b"
    literal = literal_text(tokenizer)
    for read in (tokenizer.encode, tokenizer.encode_with_offsets, literal.encode):
        for said in (text, text * 200, f"<s>{text}"):
            with refused("tokenizer cannot read a text: .*retry"):
                read(said)


# Text of many scripts, so that most characters are several byte tokens.
multibyte = st.text(st.sampled_from("ab \nZé日本語😀👩‍🚀ßж한"), max_size=60)


@settings(max_examples=150, deadline=None)
@given(text=multibyte, sizes=st.lists(st.integers(0, 5), max_size=40))
def test_stream_gives_the_whole_text(tokenizers_by_kind, text, sizes):
    for tokenizer in tokenizers_by_kind.values():
        ids = tokenizer.encode(text)
        pieces = stream(tokenizer, ids, sizes)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert not any(BROKEN in piece for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 7))
def test_stream_of_any_ids_never_takes_back(tokenizers_by_kind, seed, size):
    """Random ids: broken bytes, special tokens, ids beyond the vocabulary."""
    rng = random.Random(seed)
    for tokenizer in tokenizers_by_kind.values():
        bytes_ = sorted(tokenizer.byte_ids) or list(range(7, 263))
        ids = []
        for _ in range(rng.randrange(120)):
            any_id, special = rng.randrange(tokenizer.vocab_size), rng.randrange(4)
            beyond = tokenizer.vocab_size + rng.randrange(2)
            ids.append(rng.choice([any_id, rng.choice(bytes_), special, beyond]))
        out = "".join(stream(tokenizer, ids, [size] * (len(ids) // size)))
        # Only an unfinished end may be missing.
        assert (
            out == tokenizer.decode_after((), ids) == tokenizer.decode(ids).rstrip(BROKEN)
        )


@pytest.mark.parametrize("kind", [LLAMA, METASPACE, "sentencepiece", "byte_level"])
def test_ids_that_continue_a_prompt(kind, tokenizers_by_kind):
    """What they add to the prompt's text, whole and streamed; a turn begins a text."""
    tokenizer = tokenizers_by_kind[kind] if isinstance(kind, str) else like_llama(kind)
    ids = [tokenizer.encode(text) for text in (" a", "tin", "日", "\n", " in日\n a", "é")]
    ids += [[min(tokenizer.special_ids)], *([i] for some in ids for i in some)]
    rng, added = random.Random(0), []
    for _ in range(1000):
        prompt, new = (sum(rng.choices(ids, k=rng.randrange(5)), []) for _ in "ab")  # noqa: RUF017
        before, whole = map(tokenizer.backend.decode, (prompt, prompt + new))
        prompt += [10**6] * rng.randrange(2)  # a model may have more ids
        found = tokenizer.decode_after(prompt, new)
        shown = "".join(stream(tokenizer, new, [1] * len(new), prompt))
        assert found == shown
        turn = tokenizer.decode_after(TurnPrompt(prompt), new)
        assert turn == tokenizer.decode(new).rstrip(BROKEN)
        if BROKEN not in before and whole.startswith(before):
            assert found == whole.rstrip(BROKEN)[len(before) :], (prompt, new)
            added.append(found != turn)
    assert len(added) > 300 and (sum(added) > 50) == (kind != "byte_level")


def test_stream_shows_text_as_soon_as_it_is_certain(tokenizers_by_kind):
    tokenizer = tokenizers_by_kind["byte_level"]
    decoder = StreamDecoder(tokenizer)
    shown = [decoder.push([i]) for i in tokenizer.encode("a é日b")]
    assert "".join(shown) == "a é日b"
    assert shown[0] == "a" and "" in shown  # a half character waits
    long = tokenizer.encode("Hello, how are you? " * 60)
    decoder = StreamDecoder(tokenizer)
    for i in long:
        decoder.push([i])
    assert len(decoder._window) < 60  # the cost of a piece does not grow with the text


def test_a_sentencepiece_model_that_is_cut_between_two_pieces(sentencepiece_dir, tmp_path):
    """The library reads such a file as a smaller vocabulary."""
    shutil.copytree(sentencepiece_dir, tmp_path / "cut")
    file = tmp_path / "cut" / "tokenizer.model"
    whole = file.read_bytes()
    ends, at = [], 0
    while at < len(whole):
        size, n = whole[at + 1], 1
        if size > 127:
            size, n = (size & 127) + (whole[at + 2] << 7), 2
        at += 1 + n + size
        ends.append(at)
    # Among the pieces, before the trainer's settings, before the normaliser.
    for end in (ends[3], ends[-3], ends[-2]):
        file.write_bytes(whole[:end])
        with refused(r"the end of tokenizer\.model is missing"):
            load_tokenizer(str(tmp_path / "cut"))


def test_another_file_that_transformers_reads(byte_level_dir, tmp_path):
    shutil.copy(byte_level_dir / "tokenizer.json", tmp_path)
    names = {"fast_tokenizer_files": ["tokenizer.json"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    load_tokenizer(str(tmp_path))
    names["fast_tokenizer_files"] += ["tokenizer.4.0.0.json"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    with refused(r"fast_tokenizer_files \['tokenizer.* is not supported"):
        load_tokenizer(str(tmp_path))


def test_no_code_of_the_directory_runs(sentencepiece_dir, tmp_path, monkeypatch):
    """Not even where stdin says yes: the files name classes in a Python file next to them."""
    folder, marker = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(sentencepiece_dir, folder)
    (folder / "custom.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaTokenizer\n"
        "class C(LlamaConfig):\n    model_type = 'custom'\n"
        "class T(LlamaTokenizer):\n    pass\n"
    )
    mapped = {"AutoConfig": "custom.C", "AutoTokenizer": ["custom.T", "custom.T"]}
    kind = {"model_type": "custom", "tokenizer_class": "T"}
    for name in ("tokenizer_config.json", "config.json"):
        (folder / name).write_text(json.dumps(kind | {"auto_map": mapped}))
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n" * 9))
    with refused("contains custom code"):
        load_tokenizer(str(folder))
    assert not marker.exists()


TEXT = "The assistant  é日😀:\n\treturn [int(x)]"


def test_bytes_together_are_the_text(tokenizer):
    spelled, ids = TokenBytes(tokenizer), tokenizer.encode(TEXT)
    parts = [spelled.of(i) for i in ids]
    blank = b" " if tokenizer.byte_ids else b""  # it puts one in front of a text
    assert b"".join(parts) == blank + TEXT.encode()
    assert any(part.decode(errors="ignore").encode() != part for part in parts)
    assert spelled.of(10**6) == b""
    [special] = tokenizer.encode(end := tokenizer.special_texts["eos_token"])
    assert spelled.of(special) == end.encode()


def test_blanks_are_those_that_the_decoder_writes():
    """Without byte tokens too; a sign that it keeps is a character."""
    kinds = ("▁", decoders.Metaspace(), " "), ("_", decoders.Metaspace("_"), " ")
    for sign, decoder, blank in (*kinds, ("▁", decoders.ByteLevel(), "▁")):
        words = [sign, "a", f"{sign}a", *"Ã©"]
        backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, []))
        backend.decoder = decoder
        spelled = TokenBytes(Tokenizer(backend))
        assert [spelled.of(i).decode() for i in range(3)] == [blank, "a", f"{blank}a"]


def test_no_text_has_fewer_tokens_than_its_bytes_ask_for(tokenizer):
    spelled = TokenBytes(tokenizer)
    special = tokenizer.special_texts.values()
    words = st.sampled_from(["assistant", " ", "  ", "é日😀", *special])

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.lists(words | st.text("aé日😀 \n\t\0", max_size=5)).map("".join))
    def check(text):
        assert spelled.least_tokens(text) <= len(tokenizer.encode(text))

    check()
    known = tokenizer.backend.get_vocab()
    assert spelled.max_bytes <= max(len(word.encode()) for word in known) < 40
    assert spelled.least_tokens("a" * 1000) >= 25


def test_bytes_that_a_vocabulary_lacks_count_for_nothing():
    """As SmolLM2's does; its tokenizer drops them."""
    words = {c: i for i, c in enumerate("abÃ©")}
    backend = Backend(models.BPE(words, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    spelled = TokenBytes(tokenizer)
    assert spelled.max_bytes == 1
    for text, tokens in (("ab" * 20, 40), ("x" * 99 + "a", 1), ("éa日", 3)):
        assert len(tokenizer.encode(text)) == tokens == spelled.least_tokens(text)


def bpe(**more):
    return Backend(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", **more))


def test_where_one_token_may_cover_anything_nothing_is_told():
    """Words, and an unknown token for a text of any length."""
    words = Backend(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    for backend in (words, bpe(fuse_unk=True)):
        assert TokenBytes(Tokenizer(backend)).max_bytes is None


@pytest.mark.parametrize(
    ("step", "how"),
    [
        ("normalizer", normalizers.NFC()),
        ("normalizer", normalizers.Replace("  ", "")),
        ("pre_tokenizer", pre_tokenizers.Whitespace()),
        ("pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
    ],
)
def test_where_a_text_may_shrink_nothing_is_told(step, how, byte_level_dir):
    tokenizer = load_tokenizer(str(byte_level_dir))
    assert TokenBytes(tokenizer).max_bytes
    setattr(tokenizer.backend, step, how)
    assert TokenBytes(tokenizer).max_bytes is None


def test_no_tokenizer():
    spelled = TokenBytes(NoTokenizer("nowhere"))
    assert spelled.max_bytes is None and spelled.of(3) == b""


def test_long_texts_are_read_as_short_ones(byte_level_dir):
    tokenizer = load_tokenizer(str(byte_level_dir))
    text = "The assistant é " * (LONG // 10)
    direct = tokenizer.backend.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text) == direct.ids
    assert tokenizer.encode_with_offsets(text) == (direct.ids, direct.offsets)


BOMBS = [
    ("normalizer", normalizers.Replace("a", "a" * 10)),
    ("normalizer", normalizers.Replace(tokenizers.Regex("(?=a)"), "a")),
    ("normalizer", normalizers.Sequence([normalizers.Prepend("a"), normalizers.Replace("a", "aaa")])),
    ("normalizer", normalizers.ByteLevel()),
    ("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Split("a", "isolated"), pre_tokenizers.Metaspace()])),
    ("decoder", decoders.Replace("a", "aa")),
]  # fmt: skip


@pytest.mark.parametrize(("part", "step"), BOMBS)
def test_steps_that_multiply_a_text(part, step):
    """Nested forty times they would end the process; a few are as they were."""
    for times in (2, 40):
        backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
        module = {"normalizer": normalizers, "decoder": decoders}.get(part, pre_tokenizers)
        setattr(backend, part, module.Sequence([step] * times))
        if times == 2:
            check_growth(backend)
            continue
        with refused(f"{part} may make a text .* times as long"):
            Tokenizer(backend)
