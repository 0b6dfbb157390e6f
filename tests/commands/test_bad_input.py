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
    "roofline": "roofline --out {t}",
    "family": "family --model m --data d --calibration c",
    "prefill_cost": "prefill_cost",
    "walk": "walk",
    "recipes": "recipes --original {t} --out {t}/out",
    "train": TRAIN,
    "train here": "train --workdir {t}/w --config {c}",
}
GOOD = '{"prompt": "a"}\n'
NO_PROMPT = "line 2: a request needs a 'prompt', 'prompt_ids' or 'messages'"
STOPS = "line 2: 'stop_sequences' must be"
# Of each command: arguments, what the line says, and what the file {f} holds, if there is one.
ROWS = {
    "decode": [
        ("--drafter none --tree chain:2", "no draft heads are loaded"),
        ("--drafter none --tree 2", "no draft heads are loaded"),
        ("--prompt " + "a" * 200, f"201 tokens, the model's context is {CONTEXT}"),
        ("--prompt '' --tokenizer {bare}", "empty"),
        ("--prompt '' --tokenizer {bare}", "BOS"),
        ("--model /nowhere/at/all", "/nowhere/at/all"),
        ("--model nothing-of-the-kind", "nothing-of-the-kind"),
        ("--model {t}", "{t}"),
        ("--model {bare}", "config.json"),
        ("--drafter {m}/nowhere", "nowhere"),
        ("--drafter hydra", "--drafter hydra names the demo's heads"),
        ("--tree chain:4", "[0, 0, 0, 0]"),
        ("--tree {f}", "[0, 2, 0, 1] is 4 deep", "[[0], [0, 2], [0, 2, 0], [0, 2, 0, 1]]"),
        ("--tree {f}", "not valid JSON", "[[0], [1"),
        ("--tree {f}", "choices", '{"nodes": 3}'),
        ("--tree {f}", "[3, 1] needs its prefix [3]", "[[0], [3, 1]]"),
        ("--tree {f}", "[0] is given twice", "[[0], [0]]"),
        ("--tree {f}", "whole numbers", '[["a"]]'),
        ("--tree {f}", "9999 exceeds the vocabulary", "[[9999]]"),
        ("--tree 64", "calibrate"),
        ("--tree chain:x", "chain:4"),
        ("--tree copy:x", "copy:"),
        ("--tree nothing.json", "nothing.json"),
        ("--mesh 1,1,64", "64 devices"),
        ("--mesh 1,1", "data,fsdp,tensor"),
        ("--mesh a,b,c", "three numbers"),
        ("--acceptance greedy --temperature 1", "temperature 0"),
        ("--acceptance eager", "greedy, rejection, sampled, typical, not 'eager'"),
        ("--temperature -1", "temperature"),
        ("--top_p 0", "top_p"),
        ("--no_repeat_ngram_size -1", "no_repeat_ngram_size must be 0"),
        ("--no_repeat_ngram_size 1000000000", "0 (off) to 64, not 1000000000"),
        ("--max_new_tokens 0", "max_new_tokens"),
        ("--max_steps 0", "max_steps"),
        ("--logprobs 2", "--logprobs is shown in JSON only"),
        ("--json --save_drafts x.svg", "--save_drafts draws one text"),
        (
            "--save_drafts {m}/config.json",
            "--save_drafts {m}/config.json is a file of a model",
        ),
        ("--eos_ids 2,x", "--eos_ids is a list like 1,4,8"),
        ("--stop_sequence none", "at least one token id"),
        ("--stop_sequence 1,-4", "stop_sequences are lists"),
        ("--prompts_file x", "either --prompt TEXT or --prompts_file"),
        ("--dtype int8", "int8"),
        ("--bogus", "unknown flag --bogus (--help"),
        ("--promt hi", "unknown flag --promt; did you mean '--prompt'?"),
        ("--max-new-tokens=3", "did you mean '--max_new_tokens'?"),
        ("--max_tokens 3", "did you mean '--max_new_tokens'?"),
        ("--dtype flaot32", "argument --dtype: 'flaot32' is none of float64, float32"),
        ("--weights int_8", "did you mean 'int8'?"),
        ("b", "unexpected argument 'b'"),
        ("--repeats -1", "argument --repeats: 1 or more, not -1"),
        ("--acceptance typcal", "did you mean 'typical'?"),
        ("--chat", "no chat template"),
        ("--chat vicunha", "did you mean 'vicuna'"),
        ("--constraint json_schema:/nowhere.json", "cannot read"),
        ("--constraint regex:a --no_repeat_ngram_size 3", "give one of them"),
        ("--constraint regx:a", "did you mean 'regex'"),
        ("--constraint choice:", "choice should be"),
        ("--logit_bias a=1", "--logit_bias is a list like"),
        ("--logit_bias 1=nan", "finite numbers"),
        ("--repetition_penalty 0", "above 0"),
        ("--presence_penalty inf", "presence_penalty must be a number"),
    ],
    "no prompt": [("", "--prompt"), ("--chat", "no chat template")],
    "requests": [
        ("", "{f}"),
        ("", "holds no requests", "\n\n"),
        ("--batch_size 0", "--batch_size", GOOD),
        *(
            ("", words, GOOD + line + "\n")
            for line, words in [
                ("{", "line 2 is not JSON"),
                ("[]", NO_PROMPT),
                ('{"text": "a"}', NO_PROMPT),
                ('{"prompt": 5}', "line 2"),
                ('{"prompt_ids": ["a"]}', "line 2: 'prompt_ids' must be a list of token"),
                ('{"prompt_ids": [99999]}', "a prompt id is outside the vocabulary"),
                ('{"prompt": null}', "line 2"),
                ('{"prompt": "\\ud800"}', "unpaired surrogate"),
                ('{"messages": "hello"}', "messages"),
                ('{"prompt": "a", "temperature": "hot"}', "line 2"),
                ('{"prompt": "a", "temperature": -1}', "line 2: temperature"),
                ('{"prompt": "a", "seed": "x"}', "line 2"),
                ('{"prompt": "a", "max_new_tokens": 2.5}', "line 2"),
                ('{"prompt": "a", "max_steps": "x"}', "line 2: 'max_steps' must be int"),
                ('{"prompt": "a", "stop": 5}', "line 2"),
                ('{"prompt": "a", "stop": [5]}', "line 2"),
                ('{"prompt": "a", "eos_ids": 5}', "line 2: 'eos_ids' must be a list of"),
                ('{"prompt": "a", "eos_ids": [true]}', "line 2: 'eos_ids' must be"),
                ('{"prompt": "a", "stop_sequences": [5]}', STOPS),
                ('{"prompt": "a", "stop_sequences": 5}', STOPS),
                ('{"prompt": "a", "stop_sequences": [[]]}', "line 2: stop_sequences are"),
                ('{"prompt": "x", "constraint": {"regx": "a"}}', "did you mean 'regex'"),
                ('{"prompt": "x", "logit_bias": [3]}', "'logit_bias' must be numbers"),
                ('{"promt": "a", "prompt": "a"}', "unknown field 'promt'; did you mean 'p"),
                ('{"prompt": "a", "max_tokens": 5}', "unknown field 'max_tokens'; did you"),
                ('{"prompt": "a", "banana": 5}', "field 'banana' (there are: prompt, "),
                ('{"prompt": "a", "prompt_ids": [5]}', "not both 'prompt' and 'prompt_"),
                ('{"prompt": ' + "[" * 200_000, "line 2 cannot be read"),
                ('{"prompt": "a", "seed": ' + "9" * 5_000 + "}", "line 2 cannot be read"),
            ]
        ),
    ],
    "calibrate": [
        ("--prompts missing.jsonl", "missing.jsonl"),
        ("--sizes a", "--sizes"),
        ("--batches 0", "--batches"),
        ("--sizes 4,0", "--sizes are 1 or"),
        ("--out .", "--out . is a directory"),
        ("--out {m}/config.json", "{m}/config.json is a file of a model"),
        ("--out {m}/heads/heads.safetensors", "heads.safetensors is a file of a model"),
        ("--drafter none", "give --drafter"),
        ("--rounds 0", "1 or more, not 0"),
    ],
    "distill": [
        ("--prompts missing.jsonl", "missing.jsonl"),
        ("--ask -2", "0 or more, not -2"),
        ("--out {m}", "--out {m} holds config.json of a model"),
        ("--out {m}/heads", "--out {m}/heads holds heads.json of a model"),
        ("--batch_size 0", "1 or more, not 0"),
    ],
    "sweep": [
        ("--epsilons a,b", "--epsilons"),
        ("--drafter none", "give --drafter"),
        ("--batch_size 0", "1 or more, not 0"),
    ],
    "ties": [
        ("--prompts missing.jsonl", "missing.jsonl"),
        ("--out .", "--out . is a directory"),
        ("--out {m}/tokenizer.json", "{m}/tokenizer.json is a file of a model"),
        ("--drafter none", "give --drafter"),
        ("--batch_size 0", "1 or more, not 0"),
    ],
    "bench": [
        ("--prompts missing.jsonl", "missing.jsonl"),
        ("--out {p}/x", "prompts.jsonl/x: Not a directory"),
        ("--model nowhere/at/all", "nowhere"),
        ("--repeats 0", "argument --repeats: 1 or more, not 0"),
        ("--limit -1", "argument --limit: 0 or more, not -1"),
        ("--drafters lookahead@cartesian:2x2", "branch at the root alone"),
    ],
    "batches": [("--most_nodes x", "argument --most_nodes: invalid int value: 'x'")],
    "against": [
        ("", "is no GGUF file, which llama.cpp needs"),
        ("--peers vllm", "--peers takes transformers and llama.cpp, not 'vllm'"),
        ("--temperature 1", "engines are compared greedily"),
        ("--max_new_tokens 95", "are 97 tokens, the model's context is 96"),
        ("--no_repeat_ngram_size 3", "bars no n-grams: give --no_repeat_ngram_size 0"),
    ],
    "questions": [
        ("--max_new_tokens 96", "leaves no room for a prompt in a context of 96"),
        ("--max_prompt_tokens -1", "--max_prompt_tokens is 1 or more"),
        ("--questions none.jsonl", "cannot read none.jsonl"),
        ("--chat_template vicuna --max_prompt_tokens 4", "question 1: a prompt of at"),
        ("--chat_template vicunna", "did you mean 'vicuna'?"),
    ],
    "replay": [
        ("", "no tree file is next to the heads: give --fit"),
        ("--nodes 1", "--nodes are sizes of trees, from 2 to 128"),
        ("--drafters prompt_lookup", "no heads whose guesses could be ranked"),
        ("--drafters none", "give --drafter"),
    ],
    "convert": [
        ("--drafter hydra", "TGI loads Medusa heads only"),
        ("--drafter none", "give --drafter the heads to convert"),
        ("--bench {t}/x", "cannot be read"),
        ("--out {m}", "is not empty"),
        ("--out {m}/config.json", "is not empty"),
    ],
    "serve": [
        ("--port {taken}", "cannot listen"),
        ("--port 1000000", "cannot listen"),
        ("--slots 0", "--slots must be more than 0"),
        ("--timeout nan", "--timeout must be more than 0, not nan"),
        ("--api_key_file {t}/none", "cannot read --api_key_file"),
        ("--api_key_file {f}", "holds no key", " \n"),
        ("--chat vicnua --drafter none", "there are: vicuna"),
    ],
    "step_cost": [
        ("--shape llama-8b", "none of the shapes llama-7b"),
        ("--drafters medusae", "unknown drafter 'medusae'"),
    ],
    "roofline": [
        ("--chip x", "unknown chip 'x'; there are: a100, "),
        ("--shape 8b", "'8b' is no directory with a config.json and none of the shapes"),
        ("--batches 0,1", "--batches are 1 or more, not '0,1'"),
        ("--curve no.json", "cannot read the tree file no.json"),
    ],
    "family": [
        ("--drafters=medusa,hydro", "there is no configs/demo_hydro.py"),
        ("--nodes=8,many", "--nodes is a list like 1,4,8, not '8,many'"),
        ("--drafters=hydra,eagle", "it needs --lm_head shared, not low_rank"),
        ("--seeds=0", "--seeds must be at least 1"),
        ("--speed=9", "unknown flag --speed=9"),
    ],
    "prefill_cost": [
        ("--tokens 1k", "--tokens is a list like 1,4,8, not '1k'"),
        ("--batch 0", "--batch and --tokens are 1 or more"),
        ("--drafter x", "unknown drafter 'x': there are"),
    ],
    "walk": [
        ("--step 0", "--step is at least 1, not 0"),
        ("--drafter none", "give --drafter"),
    ],
    "recipes": [("", "no tokens.npy")],
    "train": [
        ("--confg x", "unknown flag --confg; did you mean --config?"),
        ("--config nothing.py", "nothing.py"),
        ("--config {root}/configs/nothing.py", "demo_backbone"),
        ("--config {f}", "ZeroDivisionError", "1/0"),
        ("--config {f}", "must return", "def get_config(): return 3"),
        ("--config {f}", "does not run", "x = 1"),
        ("--workdir=", "--workdir"),
        ("--config.optim.learning_rate=1", "config.optim has name, lr, warmup_steps"),
        ("--config.train.batchsize=1", "did you mean --config.train.batch_size"),
        ("--config.optm.lr=1", "did you mean --config.optim.lr"),
        ("--config.model.arch.rope_teta=1", "did you mean --config.model.arch.rope_theta"),
        ("--config.optim.lr.x=1", "unknown field"),
        ("--config.optim=1", "group of fields"),
        ("--config.optim.lr=high", "takes float, not 'high'"),
        ("--config.train.steps=1.5", "takes int, not '1.5'"),
        ("--config.train.remat=maybe", "takes bool, not 'maybe'"),
        ("--config.dry_run=maybe", "takes false, true, counted, not 'maybe'"),
        ("--config.mesh=1,2", "--config.mesh takes"),
        ("--workdri=x", "did you mean --workdir"),
        ("steps=3", "unexpected argument"),
    ],
    "train here": [
        ("--config.mesh=3,3,3", "27 devices"),
        ("--config.model.path=/no/such/model", "/no/such/model"),
        ("--workdir {m}", "--workdir {m} holds config.json of a model"),
        ("--workdir {m}/heads", "--workdir {m}/heads holds heads.json of a model"),
        ("--workdir {bare}", "--workdir {bare} holds tokenizer.json of a model"),
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
    try:
        status = module.main(given)
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert status == 2 and last.startswith("error: "), err
    if command not in ("bench", "calibrate", "convert", "replay", "roofline"):
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
