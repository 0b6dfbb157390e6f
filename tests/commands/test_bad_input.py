"""Bad input to any command: nothing on stdout, one line that names what is wrong, status 2."""

import importlib
import json
import shlex
import socket
import sys

import pytest
from tiny import CONTEXT, write_model, write_tokenizer
from training_setup import ROOT, write_config, write_tokens

from medusa_jax import hosts
from medusa_jax.__main__ import COMMANDS
from research.__main__ import COMMANDS as RESEARCH

MODEL = "--model {m} --drafter {m}/heads --prompts {p}"
BENCH = "--model {m} --drafters {m}/heads --prompts {p} --trees chain:1 --out {t}"
QUESTIONS = (
    "questions --model {m} --drafters {m}/heads --questions {q} --trees chain:1 --out {t}"
)
TRAIN = "train --workdir {t}/w --config {root}/configs/vicuna7b_m1.py"
# What comes before the arguments of a row; of a flag that is given twice the last one counts.
STARTS = {
    "decode": "decode --model {m} --drafter {m}/heads --tree chain:3 --prompt a",
    "no prompt": "decode --model {m} --drafter {m}/heads",
    "requests": "decode --model {m} --drafter {m}/heads --prompts_file {f}",
    "calibrate": f"calibrate {MODEL} --out {{t}}/x.json",
    "distill": "distill --model {m} --prompts {p} --out {t}/x",
    "sweep": f"sweep {MODEL} --out {{t}}/x",
    "ties": f"ties {MODEL} --out {{t}}/x.json",
    "bench": f"bench race {BENCH}",
    "batches": f"batches {BENCH}",
    "against": f"against {BENCH} --max_new_tokens 6 --peers llama.cpp",
    "questions": f"{QUESTIONS} --max_new_tokens 16 --chat_template plain --max_prompt_tokens 60",
    "replay": "replay --model {m} --drafters {m}/heads --questions {q} --max_new_tokens 40"
    " --nodes 6 --chat_template plain --out {t}",
    "convert": "convert --out {t}/out --drafter medusa --to tgi",
    "serve": "serve --port 0",
    "step_cost": "step_cost --out {t} --shape llama-7b",
    "family": "family --model m --data d --calibration c",
    "prefill_cost": "prefill_cost",
    "walk": "walk",
    "recipes": "recipes --original {t} --out {t}/out",
    "train": TRAIN,
    "train here": "train --workdir {t}/w --config {c}",
}
GOOD = '{"prompt": "a"}\n'
# Of each command: arguments, a part of the line, and what the file {f} holds, if it is used. One row per
# mechanism; libraries and rooms refuse the rest of their input in their own tests.
ROWS = {
    "decode": [
        ("--drafter none --tree chain:2", "no draft heads"),
        ("--prompt " + "a" * 200, str(CONTEXT)),
        ("--prompt '' --tokenizer {bare}", "BOS"),
        ("--model nothing-of-the-kind", "nothing-of-the-kind"),
        ("--model {bare}", "config.json"),
        ("--drafter {m}/nowhere", "nowhere"),
        ("--drafter hydra", "demo"),
        ("--tree chain:4", "[0, 0, 0, 0]"),
        ("--tree {f}", "[3, 1] needs its prefix [3]", "[[0], [3, 1]]"),
        ("--tree {f}", "9999", "[[9999]]"),
        ("--mesh 1,1,64", "64 devices"),
        ("--mesh 1,1", "data,fsdp,tensor"),
        ("--mesh a,b,c", "--mesh"),
        ("--acceptance greedy --temperature 1", "temperature"),
        ("--acceptance typcal", "did you mean 'typical'?"),
        ("--temperature -1", "temperature"),
        ("--no_repeat_ngram_size -1", "no_repeat_ngram_size"),
        ("--logprobs 2", "--json"),
        ("--json --save_drafts x.svg", "--save_drafts"),
        ("--save_drafts {m}/config.json", "is a file of a model"),
        ("--stop_sequence none", "stop_sequences"),
        ("--prompts_file x", "--prompts_file"),
        ("--promt hi", "unknown flag --promt; did you mean '--prompt'?"),
        ("--max_tokens=3", "did you mean '--max_new_tokens'?"),
        ("--weights int_8", "--weights"),
        ("b", "unexpected argument 'b'"),
        ("--repeats -1", "1 or more, not -1"),
        ("--chat vicunha", "did you mean 'vicuna'"),
        ("--constraint json_schema:/nowhere.json", "cannot read"),
        ("--constraint regex:a --no_repeat_ngram_size 3", "constraint"),
        ("--constraint regx:a", "did you mean 'regex'"),
        ("--logit_bias a=1", "--logit_bias"),
    ],
    "no prompt": [("", "--prompt"), ("--chat", "no chat template")],
    "requests": [
        ("", "{f}"),
        ("", "no requests", "\n\n"),
        ("--batch_size 0", "--batch_size", GOOD),
        *(
            ("", f"line 2{words}", GOOD + line + "\n")
            for line, words in [
                ("{", " is not JSON"),
                ("[]", ""),
                ('{"text": "a"}', ""),
                ('{"prompt": 5}', ": 'prompt'"),
                ('{"prompt_ids": ["a"]}', ": 'prompt_ids'"),
                ('{"messages": "hello"}', ": 'messages'"),
                ('{"prompt": "a", "temperature": "hot"}', ": 'temperature'"),
                ('{"prompt": "a", "temperature": -1}', ": temperature"),
                ('{"prompt": "a", "stop": [5]}', ": 'stop'"),
                ('{"prompt": "a", "eos_ids": [true]}', ": 'eos_ids'"),
                ('{"prompt": "a", "stop_sequences": [5]}', ": 'stop_sequences'"),
                ('{"prompt": "x", "constraint": {"regx": "a"}}', ""),
                ('{"prompt": "x", "logit_bias": [3]}', ": 'logit_bias'"),
                (
                    '{"prompt": "a", "max_tokens": 5}',
                    ": unknown field 'max_tokens'; did you",
                ),
                ('{"prompt": "a", "prompt_ids": [5]}', ""),
                ('{"prompt": ' + "[" * 200_000, ""),
                ('{"prompt": "a", "seed": ' + "9" * 5_000 + "}", ""),
            ]
        ),
    ],
    "calibrate": [
        ("--prompts missing.jsonl", "missing.jsonl"),
        ("--sizes 4,0", "--sizes: 1 or more"),
        ("--out .", "--out . is a directory"),
        ("--drafter none", "give --drafter"),
    ],
    "distill": [("--ask -2", "0 or more, not -2"), ("--out {m}", "config.json of a model")],
    "sweep": [("--epsilons a,b", "--epsilons")],
    "ties": [("--batch_size 0", "1 or more, not 0")],
    "bench": [
        ("--out {p}/x", "Not a directory"),
        ("--drafters lookahead@cartesian:2x2", "branch at the root alone"),
    ],
    "against": [
        ("", "GGUF"),
        ("--peers vllm", "vllm"),
        ("--temperature 1", "greedily"),
        ("--max_new_tokens 95", "96"),
    ],
    "questions": [
        ("--max_new_tokens 96", "96"),
        ("--questions none.jsonl", "none.jsonl"),
        ("--chat_template vicuna --max_prompt_tokens 4", "question 1"),
    ],
    "replay": [
        ("", "--fit"),
        ("--nodes 1", "--nodes"),
        ("--drafters prompt_lookup", "no heads"),
    ],
    "convert": [
        ("--drafter hydra", "Medusa heads only"),
        ("--drafter none", "give --drafter"),
        ("--bench {t}/x", "cannot be read"),
        ("--out {m}", "is not empty"),
    ],
    "serve": [
        ("--port {taken}", "cannot listen"),
        ("--slots 0", "--slots"),
        ("--api_key_file {t}/none", "--api_key_file"),
        ("--api_key_file {f}", "holds no key", " \n"),
        ("--chat vicnua --drafter none", "vicuna"),
    ],
    "step_cost": [("--shape llama-8b", "llama-7b")],
    "family": [
        ("--drafters=medusa,hydro", "configs/demo_hydro.py"),
        ("--drafters=hydra,eagle", "--lm_head shared"),
        ("--speed=9", "--speed=9"),
    ],
    "prefill_cost": [("--batch 0", "--batch")],
    "walk": [("--step 0", "--step")],
    "recipes": [("", "no tokens.npy")],
    "train": [
        ("--config {root}/configs/nothing.py", "nothing.py"),
        ("--config {f}", "ZeroDivisionError", "1/0"),
        ("--config {f}", "must return", "def get_config(): return 3"),
        ("--workdir=", "--workdir"),
        ("--config.train.batchsize=1", "did you mean --config.train.batch_size"),
        ("--config.rope_theta=1", "did you mean --config.model.arch.rope_theta"),
        ("--learning_rate=1", "did you mean --config.optim.lr"),
        ("--config.optim=1", "unknown flag"),
        ("--config.optim.lr=high", "--config.optim.lr"),
        ("--config.train.remat=maybe", "--config.train.remat"),
        ("--config.dry_run=maybe", "--config.dry_run"),
        ("--config.mesh=1,2", "--config.mesh"),
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
    question = {"question_id": 1, "category": "writing", "turns": ["the cat", "in the"]}
    (model / "questions.jsonl").write_text(json.dumps(question) + "\n")
    config = write_config(model, write_tokens(model / "tokens"), "medusa1")
    found = {"m": model, "p": model / "prompts.jsonl", "q": model / "questions.jsonl"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        yield found | {"bare": bare, "c": config, "root": ROOT, "taken": port}


def line_of(capsys, words):
    """The last line that a bad call prints; the only one unless it has shown its progress."""
    capsys.readouterr()
    command, *given = words
    module = importlib.import_module((COMMANDS | RESEARCH)[command][1])
    status = module.main(given)
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert status == 2 and last.startswith("error: "), err
    if command not in ("bench", "calibrate", "convert", "replay"):
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
    monkeypatch.chdir(ROOT if start == "family" else tmp_path)
    given, words, *content = row
    file = tmp_path / ("given.py" if start == "train" else "given.json")
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
