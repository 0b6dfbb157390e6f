"""Files that exist whole or not at all."""

import os
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest
from damages import ARRAY_DAMAGES
from tiny import write_tokenizer

from medusa_jax import whole_files
from medusa_jax.commands.decode import main as decode
from medusa_jax.commands.requests import read_requests, shared_options
from medusa_jax.commands.serve_run import read_key
from medusa_jax.config import DataConfig
from medusa_jax.distill.seeds import read_seeds
from medusa_jax.errors import UserError
from medusa_jax.evaluate.question_files import read_questions
from medusa_jax.files.json_files import read_json
from medusa_jax.text.tokenizer import load_tokenizer
from medusa_jax.training.data import sources
from medusa_jax.tree.files import TreeFile
from medusa_jax.whole_files import read_array, read_text, replacing, write_array, write_text


def constraint(kind):
    def read(path):
        flags = ["--prompt", "a", "--constraint", f"{kind}:{path}"]
        return shared_options(decode.parse(flags)).constraint

    return read


def template(path):
    write_tokenizer(path.parent)
    file = path.parent / "tokenizer.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    return load_tokenizer(str(path.parent)).chat_template


def samples(path):
    return [sources.parse(r) for r in sources.read_records(str(path), DataConfig())]


def requests(path):
    return read_requests(decode.parse(["--prompts_file", str(path)]))


LINES = '{"prompt": "grüße"}\n{"prompt": "b\u2028c"}\n'
# Whatever reads a text that people write: the file, its text, its reader.
READERS = {
    "text": ("a.txt", "grüße\nb\n", lambda path: read_text(path)),
    "json": ("config.json", '{"a":\n 1}', lambda path: read_json(str(path))),
    "template": ("chat_template.jinja", "{{ 'ü' }}\nb", template),
    "tree": ("tree.json", "[[0],\n [1]]", TreeFile.read),
    "requests": ("r.jsonl", LINES, requests),
    "schema": ("s.json", '{"const":\n "ü"}', constraint("json_schema")),
    "grammar": ("g.lark", 'start: "ü"\n', constraint("grammar")),
    "key": ("key", "abc\n", lambda path: read_key(str(path))),
    "lines": ("a.jsonl", LINES, samples),
    "list": ("a.json", '[{"text":\n "ü"}]', samples),
    "document": ("a.txt", "grüße\nb", samples),
    "directory": ("b/c.md", "grüße\nb", lambda path: samples(path.parent)),
    "seeds": ("a.jsonl", LINES, lambda path: read_seeds(str(path), "train", 0)),
    "questions": ("q.jsonl", LINES, lambda path: read_questions(str(path))),
}


@pytest.mark.parametrize("name", READERS)
def test_marks_and_line_breaks_of_other_systems(tmp_path, name):
    """A byte order mark, or two, and line breaks of Windows: the value of the plain file."""
    file, text, read = READERS[name]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode())
    want = read(path)
    for content in (text.encode("utf-8-sig"), 2 * b"\xef\xbb\xbf" + text.encode(),
                    text.replace("\n", "\r\n").encode("utf-8-sig")):  # fmt: skip
        path.write_bytes(content)
        assert read(path) == want, content


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
@pytest.mark.parametrize("name", [name for name in READERS if name != "directory"])
def test_other_encodings_are_refused(tmp_path, name, encoding):
    file, text, read = READERS[name]
    path = tmp_path / file
    path.write_bytes(text.encode(encoding))
    with pytest.raises(UserError, match=r"UTF-|utf-8"):
        read(path)


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("failure", [FULL, ValueError(), KeyboardInterrupt()])
@pytest.mark.parametrize("moment", ["writing", "flushing", "moving"])
def test_what_fails_leaves_the_old_file(tmp_path, monkeypatch, failure, moment):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(*_):
        raise failure

    if moment != "writing":
        at = {"flushing": "fsync", "moving": "replace"}[moment]
        monkeypatch.setattr(whole_files.os, at, fail)
    kind = UserError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(kind) as raised, replacing(path) as new:
        with open(new, "w") as file:
            file.write("half of")
        if moment == "writing":
            fail()
    if kind is UserError:
        assert "a.txt could not be written" in str(raised.value)
        assert "No space left on device" in str(raised.value)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_an_array_that_does_not_fit_says_why(tmp_path):
    """A limit of files' sizes stands for a full disk: both end a write within the array."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, usual[1]))
    try:
        with pytest.raises(UserError, match="File too large"):
            write_array(tmp_path / "a.npy", np.zeros(2**12))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_an_empty_directory_is_filled(tmp_path):
    """It stays itself: it may be a mount point, or a shell's directory."""
    before = os.stat(tmp_path).st_ino
    with replacing(tmp_path) as new:
        write_text(f"{new}/heads/a", "a")
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == ["heads"] and os.stat(tmp_path).st_ino == before


def test_what_a_killed_attempt_left_is_gone(tmp_path):
    """Unlike the attempt of a process that lives."""
    killed = "with replacing(sys.argv[1]) as new: os.mkdir(new); os._exit(9)"
    code = f"import os, sys; from medusa_jax.whole_files import replacing\n{killed}"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "model"])
    assert done.returncode == 9
    [left] = tmp_path.iterdir()
    with replacing(tmp_path / "model") as one, replacing(tmp_path / "model") as new:
        assert not left.exists() and len(os.listdir(tmp_path)) == 2
        assert not os.path.exists(new) and one != new
        os.makedirs(new)
        write_text(f"{new}/config.json", "{}")
        shutil.copytree(new, one)
        os.remove(f"{new}/config.json")  # an empty directory is replaced
    assert [p.name for p in tmp_path.rglob("*")] == ["model", "config.json"]


def test_files_of_others_with_such_names_stay(tmp_path):
    """They are neither removed nor, if they are links, followed; what is written is private."""
    victim, names = tmp_path / "victim", ("a.txt.new", "a.txt.x.new", "a.txt.mine.new")
    victim.write_text("theirs")
    for name in names[:2]:
        (tmp_path / name).symlink_to(victim)
    (tmp_path / names[2]).mkdir()
    (tmp_path / names[2] / "own").mkdir()
    with replacing(tmp_path / "a.txt") as new:
        assert os.stat(os.path.dirname(new)).st_mode & 0o777 == 0o700
        with open(new, "x") as file:
            file.write("ours")
    assert victim.read_text() == "theirs" and (tmp_path / "a.txt").read_text() == "ours"
    assert sorted(os.listdir(tmp_path)) == ["a.txt", *sorted(names), "victim"]


def test_a_link_stays_one_and_a_device_is_written_itself(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "through")
    assert os.read(end, 100) == b"through"
    os.close(end)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "target"]


def test_all_of_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Each file of a directory, the directories, and then the name in the one that holds it."""
    fsync, replace, seen = os.fsync, os.replace, []

    def recorded(file):
        seen.append(os.fstat(file).st_ino)
        fsync(file)

    def renamed(*names):
        seen.append("renamed")
        replace(*names)

    monkeypatch.setattr(whole_files.os, "fsync", recorded)
    monkeypatch.setattr(whole_files.os, "replace", renamed)
    with replacing(tmp_path / "model") as new:
        os.makedirs(f"{new}/heads")
        for name in ("a", "b", "heads/c"):
            with open(f"{new}/{name}", "w") as file:
                file.write(name)
    model = tmp_path / "model"
    inside = [model, *model.rglob("*")]
    at = seen.index("renamed")
    assert sorted(seen[:at]) == sorted(path.stat().st_ino for path in inside)
    assert len(inside) == 5 and seen[at + 1 :] == [tmp_path.stat().st_ino]
    seen.clear()
    write_text(tmp_path / "a", "a")
    assert seen == [(tmp_path / "a").stat().st_ino, "renamed", tmp_path.stat().st_ino]


@pytest.mark.parametrize("kind", ARRAY_DAMAGES)
def test_an_array_that_cannot_be_read_is_one_sentence(tmp_path, kind):
    """Or it is read as an array, as zeros are."""
    for mode in ("r", None):
        write_array(tmp_path / "a.npy", np.arange(99))
        ARRAY_DAMAGES[kind](tmp_path / "a.npy")
        try:
            assert isinstance(read_array(tmp_path / "a.npy", mode), np.ndarray)
        except UserError as error:
            assert str(error).startswith(f"{tmp_path}/a.npy cannot be read: ")
            assert "\n" not in str(error)
            assert kind in ("emptied", "cut", "zeroed", "overwritten", "archive", "flipped")
        else:
            assert kind not in ("emptied", "cut", "zeroed", "overwritten", "archive")
