"""Filling in the middle over HTTP: llama.cpp's `/infill`, and OpenAI's `suffix`."""

import contextlib
import threading
import time

import httpx2 as httpx
import pytest
from pieces import drop_first_space
from served import NAME, TREE, alone, ask_app, events_of, listening, load_model, until
from tiny import write_coder

from medusa_jax import Options
from medusa_jax.api import StoppingText
from medusa_jax.serving import Server, lines
from medusa_jax.serving.http import make_app
from medusa_jax.serving.lines import LineText
from medusa_jax.serving.request import Lines
from medusa_jax.text.fill import Gap, fill_of

# What llama.vim sends: see `test_editor.py`.
ASKED = {
    "id_slot": 0,
    "input_prefix": "def add(a, b):\n",
    "input_suffix": "\n\nadd(1, 2)\n",
    "input_extra": [{"text": "x = 1\n", "time": [1, 2], "filename": "a.py"}],
    "prompt": "    ret",
    "n_predict": 24,
    "stop": [],
    "n_indent": 0,
    "temperature": 0,
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 60000,
    "model": "",
}


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    path = tmp_path_factory.mktemp("coder")
    write_coder(path)
    model = load_model(path)
    server = Server(model, trees={2: TREE}, slots=2)
    server._scheduler._chunks.most_steps = 3
    with server, listening(server) as port:
        yield port


@pytest.fixture
def http(port):
    with httpx.Client(base_url=port.url, timeout=600, verify=False) as client:
        yield client
    port.wait_idle()


def infill(http, **fields):
    answer = http.post("/infill", json=ASKED | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(model, asked=ASKED):
    files = [(file["filename"], file["text"]) for file in asked["input_extra"]]
    gap = Gap(asked["input_prefix"], asked["input_suffix"])
    room = model.config.max_position - asked["n_predict"]
    return fill_of(model.tokenizer).editor_prompt(gap, asked["prompt"], files, room)


@pytest.mark.wide
def test_the_whole_answer(port, http):
    whole, prompt = infill(http), prompt_of(port.model)
    expected = alone(port.model, prompt, max_new_tokens=24)
    assert whole["content"] == expected.text and whole["stop"] is True
    assert whole["prompt"] == port.model.tokenizer.decode(prompt, skip_special=False)
    assert (whole["tokens_evaluated"], whole["tokens_predicted"]) == (len(prompt), 24)
    assert (whole["stop_type"], whole["model"]) == ("limit", NAME)
    timings = whole["timings"]
    assert (
        timings["prompt_n"] + timings["cache_n"] == len(prompt)
        and timings["predicted_n"] == 24
    )
    assert timings["predicted_ms"] > 0 and timings["prompt_per_second"] > 0
    again = infill(http)["timings"]
    assert again["cache_n"] > 0.5 * len(prompt)


def test_only_some_fields(http):
    paths = ["content", "timings/prompt_n", "timings/none", "tokens_cached"]
    names = {"content", "timings/prompt_n", "tokens_cached"}
    assert infill(http, response_fields=paths).keys() == names
    assert infill(http, response_fields=[""]) == {}


def test_a_stream(http):
    whole = infill(http)
    stream = http.post("/infill", json=ASKED | {"stream": True}).text
    events = events_of(stream + "data: [DONE]")  # llama.cpp sends no such event here
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["tokens_predicted"] == 24


def test_stop_strings(http):
    text = infill(http)["content"]
    cut = infill(http, stop=[text[5:8]])
    assert text[5:8] not in cut["content"] and text.startswith(cut["content"])
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", text[5:8])
    # One token may end with several; llama.cpp names the one that comes first.
    both = infill(http, stop=["e", "t"], logit_bias=[["the", 50]])
    assert (both["content"].count("t"), both["stopping_word"]) == (0, "t")


def test_only_the_prompt_is_read(http):
    """llama.vim sends other files ahead, to have them in the cache."""
    extra = [{"filename": "b.py", "text": "y = 2\n" * 40}]
    sent = infill(http, n_predict=0, input_extra=extra, input_prefix="", samplers=[])
    assert (sent["content"], sent["tokens_predicted"]) == ("", 0)
    assert infill(http, input_extra=extra)["timings"]["cache_n"] >= 240


@pytest.mark.wide
def test_samplers(port, http):
    greedy = infill(http)["content"]
    assert infill(http, temperature=0.9, top_k=1)["content"] == greedy
    # Without the sampler, its field counts for nothing.
    texts = {infill(http, samplers=["top_k"], seed=seed)["content"] for seed in range(4)}
    assert len(texts) > 1
    choices = infill(http, n_cmpl=2, temperature=1, seed=3)  # a list
    assert [one["index"] for one in choices] == [0, 1] and choices[0] != choices[1]
    assert infill(http, samplers=["temperature"])["content"] == greedy
    # Where an end is nearly as likely as the text, `infill` ends.
    ended = infill(http, samplers=["top_k", "top_p", "infill"], temperature=1)
    assert greedy.startswith(ended["content"])
    barred = infill(http, samplers=["infill"], logit_bias=[[greedy[0], False]])["content"]
    assert barred[:1] != greedy[0] == infill(http, samplers="kpi")["content"][0]


@pytest.mark.parametrize(
    ("fields", "status", "about"),
    [
        ({"input_prefix": None}, 400, "'input_prefix' is missing"),
        (
            {"input_extra": [{"filename": "a"}]},
            400,
            "'text' in 'input_extra[0]' is missing",
        ),
        ({"mirostat": 2}, 400, "'mirostat' is not supported"),
        ({"n_predictt": 2}, 400, "unknown field 'n_predictt'"),
        ({"n_indent": -1}, 400, "'n_indent' should be"),
    ],
)
def test_what_is_refused(http, fields, status, about):
    answer = http.post("/infill", json=ASKED | fields)
    assert answer.status_code == status and about in answer.text


def test_a_model_without_the_tokens(shared_port):
    app = make_app(shared_port.server, name=NAME, template="")
    answer = ask_app(app, "POST", "/infill", json=ASKED)
    assert answer.status_code == 501 and "cannot fill in a middle" in answer.text
    answer = ask_app(app, "POST", "/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"


def test_the_suffix_of_a_completion(port, http):
    body = {"prompt": "def f(", "suffix": "):\n", "max_tokens": 9, "temperature": 0}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    prompt = fill_of(port.model.tokenizer).prompt(Gap("def f(", "):\n"))
    assert choice["text"] == alone(port.model, prompt, max_new_tokens=9).text
    assert port.model.complete("def f(", "):\n", Options(9)).text == choice["text"]
    refused = http.post("/v1/completions", json=body | {"prompt": [5, 6]})
    assert refused.status_code == 400 and "'suffix' needs a prompt of text" in refused.text


def test_the_first_space_of_a_middle(port, http, monkeypatch):
    bias = drop_first_space(port.model.tokenizer, monkeypatch)
    for prefix, text in ("f(", "   "), ("", "  "):
        assert port.model.complete(prefix, "", Options(3, logit_bias=bias)).text == text
    answer = infill(http, n_predict=3, logit_bias=bias, stop=["   "])
    assert answer["content"] == "" and answer["stopping_word"] == "   "


def test_time_ends_a_completion(port, http):
    with port.slowed(0.05):
        start = time.monotonic()
        whole = infill(http, n_predict=700, t_max_predict_ms=300)
        seconds = time.monotonic() - start
    assert 0 < whole["tokens_predicted"] < 100 and whole["stop_type"] == "limit"
    assert whole["timings"]["predicted_ms"] < 2 * 300 + 500 and seconds < 5


def shown_of(tokenizer, text, rules, monkeypatch, seconds_a_token=0.0, pieces=1):
    """The text that a completion of these characters shows, and whether a rule ended it."""
    clock = [0.0]
    monkeypatch.setattr(lines.time, "perf_counter", lambda: clock[0])
    made = LineText(rules, tokenizer, ())
    ids, shown = tokenizer.encode(text), ""
    for at in range(0, len(ids), pieces):
        part = ids[at : at + pieces]
        ended = at + pieces >= len(ids)
        shown += "".join(x for x, _ in made.take(part, [0] * len(part), ended))
        clock[0] += seconds_a_token * pieces
    assert shown == made.text
    return shown, made.stop_reason == "length"


@pytest.mark.parametrize("pieces", [1, 3, 100])
@pytest.mark.parametrize(
    ("indent", "text", "shown"),
    [
        (4, "x:\n    y\n  z\n", "x:\n    y\n"),
        (4, "x\n    y", "x\n    y"),
        (4, "x\n\n    y", "x\n"),  # as llama.cpp
        (2, "x\n\t\ty\nz", "x\n\t\ty\n"),
        (0, "x\ny\nz", "x\ny\nz"),
    ],
)
def test_a_line_with_less_indentation_ends_it(
    port, monkeypatch, indent, text, shown, pieces
):
    text, shown = text.replace("\t", " "), shown.replace("\t", " ")
    made = shown_of(port.model.tokenizer, text, Lines(indent), monkeypatch, pieces=pieces)
    assert made == (shown, text != shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ab\ncd\nefghijklm", "ab\ncd\n"),  # the last whole line
        ("abcdefgh\nijkl", "abcdefgh\n"),  # the first line, if it ends in twice the time
        ("a" * 40, "a" * 17),
        ("ab", "ab"),
    ],
)
def test_lines_end_by_time(port, monkeypatch, text, shown):
    made = shown_of(port.model.tokenizer, text, Lines(seconds=7.5), monkeypatch, 1.0)
    assert made == (shown, text != shown)
    plain = StoppingText(port.model.tokenizer, ())
    assert plain.stop_reason == "stop"


def test_a_closed_request_frees_its_slot_and_nobody_waits(port, http):
    """Each keystroke closes the last request: those of the past hold none of the present."""
    threads = []

    def ask(timeout):
        body = ASKED | {"n_predict": 800, "prompt": str(timeout)}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{port.url}/infill", json=body, timeout=timeout)

    with port.slowed(0.05):
        for i in range(6):
            threads.append(threading.Thread(target=ask, args=(0.3 + i / 1000,)))
            threads[-1].start()
            threads[-1].join()
        until(lambda: not port.server.busy, 2)
        long = threading.Thread(target=ask, args=(60,))
        long.start()
        until(lambda: port.server.busy)
        assert infill(http, n_predict=4)["tokens_predicted"] == 4
        assert port.server.busy == 1  # the long one still is being answered
    long.join()
