"""Text of any kind to token arrays; what cannot be used is skipped, counted, reported."""

import json
import shutil

import numpy as np
import pytest
from files import write_lines
from training_setup import texts_of, tiny_config

from medusa_jax.config import DataConfig
from medusa_jax.errors import UserError
from medusa_jax.text.answers import encode_conversation
from medusa_jax.text.tokenizer import load_tokenizer
from medusa_jax.training.data.conversations import RecordEncoder, parse_turns, turns_of
from medusa_jax.training.data.sources import parse, read_records
from medusa_jax.training.data.texts import token_directory


def text_config(vicuna, workdir, source, **data):
    cfg = tiny_config(str(source))
    cfg.model.tokenizer, cfg.workdir = vicuna, str(workdir)
    for name, value in ({"seq_len": 64, "packing": "first_fit"} | data).items():
        setattr(cfg.data, name, value)
    return cfg


def directory_of(cfg):
    tokenizer = cfg.model.tokenizer_path
    return token_directory(cfg.data.source, tokenizer, cfg.data, cfg.workdir)


def samples_of(directory):
    names = "tokens", "counted", "doc_starts"
    tokens, counted, starts = (np.load(f"{directory}/{name}.npy") for name in names)
    return [*zip(np.split(tokens, starts[1:]), np.split(counted, starts[1:]))]


ASKED, ANSWERED = "What is a tree?", "A tree is a graph without cycles."


def turns(user, assistant, role="role", text="content"):
    return [{role: user, text: ASKED}, {role: assistant, text: ANSWERED}]


MESSAGES = turns("user", "assistant")
# Every record asks and answers the same; (record, what it is called).
FORMS = [
    ({"messages": MESSAGES}, "messages (role, content)"),
    (
        {"conversations": turns("human", "gpt", "from", "value")},
        "conversations (from, value)",
    ),
    ({"conversations": MESSAGES}, "conversations (role, content)"),
    ({"messages": turns("User", "Assistant", "from", "value")}, "messages (from, value)"),
    ({"messages": turns("human", "model", "role", "value")}, "messages (role, value)"),
    ({"conversation": turns("user", "bot"), "text": None}, "conversation (role, content)"),
    (MESSAGES, "messages (role, content)"),
    (
        {"conversations": {"from": ["human", "gpt"], "value": [ASKED, ANSWERED]}},
        "conversations (from, value)",
    ),
    (
        {"instruction": "What is", "input": "a tree?", "output": ANSWERED},
        "instruction, input, output",
    ),
    (
        {"instruction": ASKED, "input": "", "output": ANSWERED, "text": "Below is ..."},
        "instruction, input, output",
    ),
    ({"prompt": ASKED, "completion": ANSWERED}, "prompt, completion"),
    ({"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}, "prompt, completion"),
    ({"prompt": ASKED, "response": ANSWERED, "messages": None}, "prompt, response"),
    ({"question": ASKED, "answer": ANSWERED}, "question, answer"),
]


@pytest.mark.parametrize(("record", "form"), FORMS)
def test_forms_of_conversations(vicuna, record, form):
    """Ids and counted tokens of the same conversation as messages, and its form in words."""
    tokenizer = load_tokenizer(vicuna)
    kind = "messages" if form.startswith("messages") else "auto"
    encode = RecordEncoder(tokenizer, DataConfig(chat_template="vicuna", format=kind))
    want = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
    if form == "instruction, input, output" and record["input"]:
        want[0]["content"] = "What is\n\na tree?"
    ids, counted = encode_conversation(tokenizer, want, "vicuna")
    assert encode(record)[:3] == ("", [(ids, counted)], form)
    system = {"role": "system", "content": "Be brief."}
    with_system = encode_conversation(tokenizer, [system, *want], "vicuna")
    if isinstance(record, dict):
        assert encode(record | {"system": "Be brief."}).pieces == [with_system]


def write_as(path, kind, found):
    if kind == "list":
        path.write_text(json.dumps(found))
    elif kind == "printed":
        path.write_text(json.dumps(found, indent=1))
    elif kind == "lines":
        path.write_text("\n".join(map(json.dumps, found)))
    else:
        rows = [{"messages": None, "conversations": None} | record for record in found]
        pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.json", "list"), ("a.jsonl", "list"), ("a.jsonl", "printed"), ("a.json", "lines"),
     ("a.jsonl", "lines"), ("a.parquet", "parquet"), ("data/train-0.parquet", "parquet")],
)  # fmt: skip
def test_what_is_taken_is_said_once(vicuna, tmp_path, capsys, name, kind):
    """By what a file holds, not by its name; a directory of parquet files is one data set."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    bad = {"messages": [{"role": "tool", "content": "x"}]}
    write_as(path, kind, [FORMS[0][0], bad, FORMS[2][0], FORMS[0][0], bad])
    source = path.parent if path.parent != tmp_path else path
    cfg = text_config(vicuna, tmp_path / "w", source, chat_template="vicuna", seq_len=256)
    ids, counted = encode_conversation(load_tokenizer(vicuna), MESSAGES, "vicuna")
    samples = samples_of(directory_of(cfg))
    assert [(i.tolist(), c.tolist()) for i, c in samples] == [(ids, counted)] * 3
    said = capsys.readouterr().err
    taken = "2 x messages (role, content), 1 x conversations (role, content)"
    assert said.count(f"3 of 5 samples used ({taken})") == 1
    where = "line 2" if kind == "lines" else "sample 2"
    assert said.count(f"2 samples skipped (2 x unknown role 'tool', first in {where})") == 1


def test_a_list_of_turns_is_one_record(tmp_path):
    """Under either suffix, on one line or more; a list of other objects is a list of records."""
    talk = turns("Human", "gpt", "from", "value")
    files = [tmp_path / "a.jsonl", tmp_path / "a.json"]
    for path, indent in ((path, indent) for path in files for indent in (None, 1)):
        path.write_text(json.dumps(talk, indent=indent))
        [record] = read_records(str(path), DataConfig())
        assert parse(record) == talk
    for records in ([{"author": "human", "text": ASKED}], [MESSAGES], [ASKED, ANSWERED]):
        path.write_text(json.dumps(records))
        assert read_records(str(path), DataConfig()) == records


def test_bad_samples_are_skipped_and_named_by_their_line(vicuna, tmp_path, capsys):
    """The first of each kind, blank lines counted; none ends the run, however strange, but all do."""
    good = json.dumps({"text": "A tree is a graph without cycles."}).encode()
    latin = '{"text": "grüße"}'.encode("latin-1")
    deep, surrogate = b"[" * 9000 + b"]" * 9000, b'{"text": "\\ud800"}'
    lines = [b"", good, b"{broken", latin, b"\0" * 9, good, deep, surrogate, b'{"a": 1}']
    source = tmp_path / "talk.jsonl"
    source.write_bytes(b"\n".join(lines))
    assert len(samples_of(directory_of(text_config(vicuna, tmp_path, source)))) == 2
    said = capsys.readouterr().err
    assert "2 of 8 samples used" in said and "6 samples skipped" in said
    assert "2 x broken JSON, first in line 3" in said
    assert "2 x not UTF-8, first in line 4" in said
    assert "unpaired surrogate, which is not a valid character, first in line 8" in said
    source.write_bytes(b"\n\n{broken\n")
    with pytest.raises(UserError, match=r"none of the 1 .*broken JSON, first in line 3"):
        directory_of(text_config(vicuna, tmp_path, source))
    tokens = {"seed": 0, "prompt_ids": [1], "token_ids": [5]}  # of distill --mode continue
    with pytest.raises(UserError, match="`distill` wrote: name their directory, first in"):
        directory_of(text_config(vicuna, tmp_path, write_lines(source, [tokens])))
    whole = tmp_path / "talk.json"
    whole.write_text(json.dumps([json.loads(good), {"text": 3}]))
    directory_of(text_config(vicuna, tmp_path, whole))
    assert "1 x no text, first in sample 2" in capsys.readouterr().err


def test_a_directory_of_text_files(vicuna, tmp_path, capsys):
    """A sample each, in order of their paths; read again when one of them changes."""
    folder = tmp_path / "texts"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "x.py").write_text("for i in range(10):\n    print(i)\n")
    (folder / "b.md").write_text("A tree is a graph.\n")
    (folder / "c.txt").write_text(" ")
    (folder / "__init__.py").write_text("")
    (folder / "d.bin").write_bytes(b"\xff\x00")
    cfg = text_config(vicuna, tmp_path, folder)
    first = directory_of(cfg)
    samples = [load_tokenizer(vicuna).decode(ids) for ids, _ in samples_of(first)]
    assert len(samples) == 2 and "range(10)" in samples[0] and "A tree" in samples[1]
    said = capsys.readouterr().err
    assert "2 of 3 samples used" in said and f"1 x no text, first in {folder}/c.txt" in said
    (folder / "b.md").write_text("A tree is a graph without cycles.\n")
    (folder / "a" / "package.json").write_text("{}")
    assert directory_of(cfg) != first


@pytest.mark.parametrize(
    ("data", "others"),
    [("train.jsonl", ["README.md"]), ("a/train.json", ["README.md"]),
     ("train.jsonl", ["README.md", "load.py"]), ("messages.jsonl", ["settings.json"])],
)  # fmt: skip
def test_a_directory_with_records_is_refused(tmp_path, data, others):
    """As a clone of a data set has them, or a run of `distill`: its card is not what to learn."""
    for name in (data, *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}')
    with pytest.raises(
        UserError, match=f"no JSON is read: name the file, such as {tmp_path}/{data}"
    ):
        read_records(str(tmp_path), DataConfig())


def test_samples_that_run_in_circles_are_left_out(vicuna, tmp_path, capsys):
    """Only what counts is looked at; one rule for text and conversations; resumed by its own name."""
    question = {"role": "user", "content": "and on " * 20}
    said = ["one two three four five six", "on and " * 20]
    talks = [{"messages": [question, {"role": "assistant", "content": s}]} for s in said]
    texts = [{"text": text} for text in reversed(said)]
    source = write_lines(tmp_path / "talk.jsonl", [*talks, *texts])
    options = {"chat_template": "vicuna", "seq_len": 256}
    cfg = text_config(vicuna, tmp_path, source, **options)
    assert len(samples_of(directory_of(cfg))) == 4
    capsys.readouterr()
    cfg = text_config(vicuna, tmp_path, source, max_repeats=0.5, **options)
    tokenizer = load_tokenizer(vicuna)
    kept = [tokenizer.decode(ids) for ids, _ in samples_of(directory_of(cfg))]
    assert len(kept) == 2 and all("one two three" in text for text in kept)
    assert "2 x repeats itself" in capsys.readouterr().err


def test_an_answer_beyond_the_row_is_no_sample(vicuna, sharegpt, tmp_path):
    cfg = text_config(vicuna, tmp_path, sharegpt, chat_template="vicuna", seq_len=8)
    with pytest.raises(UserError, match="no counted token within seq_len"):
        directory_of(cfg)
    cfg.data.packing = "concat"  # which splits it
    assert all(counted.any() for _, counted in samples_of(directory_of(cfg)))


def test_text_lines_and_files(vicuna, tmp_path):
    tokenizer = load_tokenizer(vicuna)
    lines = tmp_path / "text.jsonl"
    lines.write_text('{"text": "A tree is a graph."}\n{"text": " "}\n{"text": 3}\n')
    ids, counted = samples_of(directory_of(text_config(vicuna, tmp_path, lines)))[0]
    assert tokenizer.decode(ids).strip() == "A tree is a graph." and counted.all()
    assert ids[0] == tokenizer.bos_id and ids[-1] in tokenizer.eos_ids
    file = tmp_path / "text.txt"
    file.write_text("A forest is several trees side by side.\n" * 50)
    pieces = samples_of(directory_of(text_config(vicuna, tmp_path, file)))
    assert len(pieces) > 3 and all(len(piece) <= 64 for piece, _ in pieces)
    whole = samples_of(directory_of(text_config(vicuna, tmp_path, file, packing="concat")))
    assert len(whole) == 1
    assert np.array_equal(np.concatenate([p for p, _ in pieces]), whole[0][0])


def test_tokenised_once(vicuna, sharegpt, tmp_path, monkeypatch):
    cfg = text_config(vicuna, tmp_path, sharegpt, chat_template="vicuna", seq_len=256)
    first = directory_of(cfg)
    monkeypatch.setattr("medusa_jax.training.data.texts.tokenise", None)
    assert directory_of(cfg) == first


def test_an_edited_tokenizer_reads_the_text_again(vicuna, sharegpt, tmp_path):
    copy = shutil.copytree(vicuna, tmp_path / "tokenizer")
    cfg = text_config(str(copy), tmp_path, sharegpt, seq_len=256)
    found = []
    for mark in ("Q", "W"):
        template = f"{{% for m in messages %}}{mark}{{{{ m.content }}}}{{% endfor %}}"
        (copy / "chat_template.jinja").write_text(template + "{# #}" * len(found))
        found.append(samples_of(directory_of(cfg))[0][0].tolist())
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("source", "data", "words"),
    [
        (" ,", {}, "data.source is empty"),
        ("/no/such/file.jsonl,", {}, "no file or token directory /no/such/file.jsonl"),
        ("/no/such", {"format": "tokens"}, "has no tokens.npy"),
    ],
)
def test_sources_that_are_not_there(vicuna, tmp_path, source, data, words):
    with pytest.raises(UserError, match=words):
        texts_of(text_config(vicuna, tmp_path, source, **data))


def test_a_hub_id_without_network_names_it(vicuna, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def offline(*_, **__):
        raise ConnectionError("cannot reach the hub\nlong trace")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    words = "who/what is neither .*cannot reach the hub.*auth login"
    with pytest.raises(UserError, match=words):
        directory_of(text_config(vicuna, tmp_path, "who/what"))


# Turns: their roles and fields, and why some are skipped.


def share(*turns):
    return [{"from": who, "value": text} for who, text in turns]


def said(*turns):
    """Messages of (role, text)."""
    return [{"role": role, "content": text} for role, text in turns]


# Fields that a table fills with None do not count as given.
ODD = [
    {"role": "developer", "content": "s"},
    {"role": " User", "value": [{"type": "text", "text": "a"}], "content": None},
    {"from": "prompter", "content": "b", "role": None},
]
THOUGHT = {"from": "MODEL ", "content": "b", "role": None, "reasoning_content": "t"}
PAIR = [("user", "a"), ("assistant", "b")]


@pytest.mark.parametrize(
    ("turns", "want"),
    [
        (share(("gpt", "cut off"), ("human", "a"), ("gpt", "b"), ("human", "c")), said(*PAIR)),
        (share(("system", "s"), ("user", "a"), ("chatgpt", "b")), said(("system", "s"), *PAIR)),
        ([*ODD[:2], THOUGHT | {"weight": 0}],
         [*said(("system", "s"), PAIR[0]),
          said(PAIR[1])[0] | {"reasoning_content": "t", "weight": "0"}]),
        ([ODD[2] | {"weight": 7}, said(PAIR[1])[0] | {"weight": 1}], said(("user", "b"), PAIR[1])),
        ([], "no answered user turn"),
        (["x"], "a turn that is no object"),
        ([{"speaker": "User", "text": "a"}, {"sender": "ai", "message": "b"}], said(*PAIR)),
        ([{"who": "a", "text": "x"}],
         "a turn with who, text, but none of role, from, speaker, sender, author"),
        ([{"role": "user", "content": None, "words": "a"}],
         "a turn with role, words, but none of content, value, text, message, utterance"),
        ([THOUGHT | {"weight": 0.5}], "a turn with the weight 0.5, not 0 or 1"),
        (share(("human", "a")), "no answered user turn"),
        (share(("human", "a"), ("tool", "b")), "unknown role 'tool'"),
        (share(("human", "a"), ("human", "b"), ("gpt", "c")), "roles do not alternate"),
        (share(("human", "a"), ("gpt", " ")), "an empty assistant turn"),
        (share(("human", "a"), ("gpt", 3)), "a turn of 'gpt' without text in 'value'"),
        ([{"role": "user", "content": [1]}], "a turn of 'user' without text in 'content'"),
        (share(("human", "a"), ("system", "s"), ("gpt", "c")), "roles do not alternate"),
    ],
)  # fmt: skip
def test_turns_or_the_reason_why_not(turns, want):
    assert parse_turns(turns) == ((want, "") if isinstance(want, list) else ([], want))


ALPACA = {"instruction": "e", "input": "", "output": "f"}
PAIRS = [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    ("record", "form", "texts", "unread"),
    [
        # LlamaFactory's, whose answers are learned too.
        (ALPACA | {"history": PAIRS, "system": "s"}, "instruction, input, output, history", "sabcdef", []),
        (ALPACA | {"history": [], "category": "x", "n": 3}, "instruction, input, output", "ef", ["category"]),
        ({"prompt": "a", "completion": "b", "tools": [{"name": "t"}]}, "prompt, completion", "ab", ["tools"]),
        ({"conversations": share(("human", "a"), ("gpt", "b")), "chosen": {"value": "x"}},
         "conversations (from, value)", "ab", ["chosen"]),
        ({"messages": [*said(PAIR[0]), said(PAIR[1])[0] | {"name": "n", "weight": 1}], "seed": 1,
          "answers": [{"finish": "stop"}]}, "messages (role, content)", "ab", ["name"]),
    ],
)  # fmt: skip
def test_fields_are_read_or_named(record, form, texts, unread):
    found = turns_of(record)
    assert (found.form, found.unread) == (form, unread)
    messages, problem = parse_turns(found.turns)
    assert ("".join(m["content"] for m in messages), problem) == (texts, "")


def test_a_broken_history_is_a_reason():
    for history in ("a", [["a", "b", "c"]], [["a", 3]]):
        assert parse_turns(turns_of(ALPACA | {"history": history}).turns)[1]


def test_fields_that_are_not_read_are_named(vicuna, tmp_path, capsys):
    records = [ALPACA | {"source": "web"}, ALPACA | {"source": "book", "lang": "en"}]
    file = write_lines(tmp_path / "a.jsonl", records)
    directory_of(text_config(vicuna, tmp_path, file, chat_template="vicuna", seq_len=256))
    said = capsys.readouterr().err
    assert (
        "fields with text that are not read: source (2 samples), lang (1 samples)" in said
    )
