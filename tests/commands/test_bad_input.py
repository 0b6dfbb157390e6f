"""Bad input to any command: nothing on stdout, one line that names what is wrong, status 2."""

import importlib
import shlex
import socket
import sys

import pytest
from tiny import write_model, write_tokenizer
from training_setup import ROOT, write_config, write_tokens

from medusa_jax import hosts
from medusa_jax.__main__ import COMMANDS

MODEL = "--model {m} --drafter {m}/heads --prompts {p}"
TRAIN = "train --workdir {t}/w --config {root}/configs/vicuna7b_m1.py"
# What comes before the arguments of a row; of a flag that is given twice the last one counts.
STARTS = {
    "decode": "decode --model {m} --drafter {m}/heads --tree chain:3 --prompt a",
    "no prompt": "decode --model {m} --drafter {m}/heads",
    "no model": "decode --prompt a",
    "requests": "decode --model {m} --drafter {m}/heads --prompts_file {f}",
    "calibrate": f"calibrate {MODEL} --out {{t}}/x.json",
    "bench": "bench --model {m} --drafters none --prompts {p}",
    "distill": "distill --model {m} --prompts {p} --out {t}/x",
    "convert": "convert --out {t}/out --drafter medusa --to tgi",
    "serve": "serve --port 0",
    "train": TRAIN,
    "train here": "train --workdir {t}/w --config {c}",
}
GOOD = '{"prompt": "a"}\n'
# Of each command: arguments, a part of the line, and what the file {f} holds, if it is used. One row per
# mechanism; libraries and rooms refuse the rest of their input in their own tests.
ROWS = {
    "decode": [
        ("--drafter none --tree chain:2", "no draft heads"),
        ("--prompt '' --tokenizer {bare}", "BOS"),
        ("--model nothing-of-the-kind", "nothing-of-the-kind"),
        ("--model {bare}", "config.json"),
        ("--drafter hydra", "bundled with"),
        ("--tree chain:4", "[0, 0, 0, 0]"),
        ("--tree {f}", "[3, 1] needs its prefix [3]", "[[0], [3, 1]]"),
        ("--mesh a,b,c", "--mesh"),
        ("--raw --chat", "--raw"),
        ("--logprobs 2", "--json"),
        ("--json --save_drafts x.svg", "--save_drafts"),
        ("--save_drafts {m}/config.json", "is a file of a model"),
        ("--save_drafts /proc/x.svg", "--save_drafts /proc/x.svg cannot be written"),
        ("--prompts_file x", "--prompts_file"),
        ("--promt hi", "unknown flag --promt; did you mean '--prompt'?"),
        ("b", "unexpected argument 'b'"),
        ("--repeats -1", "--repeats: from 1 to"),
        ("--chat vicunha", "did you mean 'vicuna'"),
        ("--constraint json_schema:/nowhere.json", "cannot read"),
        ("--constraint json_object:a.json", "takes no value"),
        ("--constraint regex:a --no_repeat_ngram_size 3", "constraint"),
    ],
    "no model": [("--drafter {m}/heads", "(without --model, the model is the demo)")],
    "no prompt": [("", "--prompt"), ("--chat", "no chat template")],
    "requests": [
        ("", "{f}"),
        *(
            ("", f"line 2{words}", GOOD + line + "\n")
            for line, words in [
                ("{", " is not JSON"),
                ('{"prompt": 5}', ": 'prompt'"),
                ('{"prompt": "a", "max_tokens": 5}', ": unknown field 'max_tokens'; did"),
                ('{"prompt": "a", "temperature": "hot"}', ": temperature"),
                ('{"prompt": "a", "prompt_ids": [5]}', ""),
                ('{"prompt": ' + "[" * 200_000, ""),
                ('{"prompt": "a", "seed": ' + "9" * 5_000 + "}", ""),
            ]
        ),
        (
            "--batch_size 1",
            "{f} request 2: logprobs 99 exceeds",
            GOOD + '{"prompt": "a", "logprobs": 99}',
        ),
    ],
    "calibrate": [
        ("--batches 4,99999999", "--batches: from 1 to 4096, not 99999999"),
        ("--sizes 64,200", "--sizes: from 1 to 128, not 200"),
        ("--out .", "--out . is a directory"),
        ("--out /proc/x.json", "--out /proc/x.json cannot be written"),
        ("--drafter none", "give --drafter"),
        ("--drafter prompt_lookup", "prompt_lookup has no heads"),
        ("--prompts {f} --out {f}", "{f} exists and is not a tree file", GOOD),
    ],
    "bench": [
        ("--out {m}", "config.json of a model"),
        ("--out {p}/x", "--out {p}/x cannot be written: Not a directory"),
    ],
    "distill": [("--ask -2", "from 0 to"), ("--out {m}", "config.json of a model")],
    "convert": [
        ("--drafter hydra", "is for medusa heads"),
        ("--drafter {m}/heads --to native", "(without --model, the model is the demo)"),
        ("--drafter prompt_lookup:tokens=4", "prompt_lookup has no heads"),
        ("--out {m}", "is not empty"),
        ("--out ''", "is not empty"),
    ],
    "serve": [
        ("--port {taken}", "cannot listen"),
        ("--host ''", "--host is empty"),
        ("--api_key_file {t}/none", "--api_key_file"),
        ("--api_key_file {f}", "holds no key", " \n"),
        ("--chat vicnua --drafter none", "vicuna"),
    ],
    "train": [
        ("--config {root}/configs/nothing.py", "nothing.py"),
        ("--config {f}", "ZeroDivisionError", "1/0"),
        ("--workdir=", "--workdir"),
        ("--config.train.batchsize=1", "did you mean --config.train.batch_size"),
        ("--config.mesh=1,x", "--config.mesh"),
        ("steps=3", "unexpected argument"),
    ],
    "train here": [
        ("--config.mesh=3,3,3", "27 devices"),
        ("--config.model.path=/no/such/model", "/no/such/model"),
        ("--workdir {m}", "config.json of a model"),
    ],
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """What rows name in braces, but for what is each test's own."""
    model, bare = (tmp_path_factory.mktemp(name) for name in ("model", "bare"))
    write_model(model)
    write_tokenizer(bare, bos=False)
    (model / "prompts.jsonl").write_text(GOOD)
    config = write_config(model, write_tokens(model / "tokens"), "medusa1")
    found = {"m": model, "p": model / "prompts.jsonl"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        yield found | {"bare": bare, "c": config, "root": ROOT, "taken": port}


def line_of(capsys, words):
    """The last line that a bad call prints; the only one unless it has shown its progress."""
    capsys.readouterr()
    command, *given = words
    module = importlib.import_module(COMMANDS[command].module)
    status = module.main(given)
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert status == 2 and last.startswith("error: "), err
    if command not in ("calibrate", "convert", "train"):
        assert out == "" and err.count("\n") == 1, (out, err)
    return last


def braced(text, places):
    for name, value in places.items():
        text = text.replace("{" + name + "}", str(value))
    return text


@pytest.mark.parametrize(
    ("start", "row"),
    [
        pytest.param(start, row, id=f"{start}-{row[0][:40]}-{n}")
        for start, rows in ROWS.items()
        for n, row in enumerate(rows)
    ],
)
def test_bad_input(start, row, places, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given, words, *content = row
    file = tmp_path / "given.json"
    if content:
        file.write_text(content[0])
    places = places | {"t": tmp_path, "f": file}
    call = shlex.split(braced(f"{STARTS[start]} {given}", places))
    assert braced(words, places) in line_of(capsys, call)


@pytest.mark.parametrize(("start", "flag"), [("train here", "workdir"), ("distill", "out")])
def test_a_directory_is_one_process_s(start, flag, places, tmp_path, capsys):
    call = shlex.split(braced(STARTS[start], places | {"t": tmp_path}))
    with hosts.locked(tmp_path):
        said = line_of(capsys, [*call, f"--{flag}={tmp_path}"])
    assert f"{tmp_path} is in use by another process" in said


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "starlette", None)
    said = line_of(capsys, ["serve", "--port", "0"])
    assert "needs starlette: pip install 'medusa-jax[serve]'" in said
