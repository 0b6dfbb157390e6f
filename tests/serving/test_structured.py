"""Constrained answers over the port, asked for by the official client as it is."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Literal

import httpx2 as httpx
import openai
import pydantic
import pytest
from openai.lib._pydantic import to_strict_json_schema
from served import NAME, QUEUE, alone, counted, listening, port_of, raw, until
from tiny import PRINTABLE

from medusa_jax import Options, UserError
from medusa_jax.constraints import Grammars, constraint_of, grammars, guide
from medusa_jax.constraints.guide import Guide, Patience
from medusa_jax.decoding import constrained
from medusa_jax.serving import Request, server
from medusa_jax.serving.http import Limits
from medusa_jax.text.chat import encode_prompt

pytest.importorskip("llguidance")

MESSAGES = [{"role": "user", "content": "Name a pet."}]


class Pet(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=4)
    age: int = pydantic.Field(ge=0, le=30)
    kind: Literal["cat", "dog"]


SCHEMA = Pet.model_json_schema() | {"additionalProperties": False}


@pytest.fixture(scope="module")
def shared_port(tmp_path_factory):
    """A model whose vocabulary can write JSON; it shares its compiled programs with `test_tools.py`."""
    path = tmp_path_factory.mktemp("structured")
    with port_of(path, characters=PRINTABLE, max_position=1024) as port:
        yield port


def ask(client, **fields):
    asked = {"model": NAME, "messages": MESSAGES, "max_tokens": 150, "temperature": 0.8}
    return client.chat.completions.create(**asked | {"seed": 1} | fields)


@pytest.mark.wide
def test_a_pydantic_model_is_parsed(port, client):
    schema = to_strict_json_schema(Pet)
    drawn = {"temperature": 0.8, "seed": 1}
    asked = drawn | {"model": NAME, "messages": MESSAGES, "max_tokens": 150}
    answer = client.chat.completions.parse(**asked, response_format=Pet)
    [choice] = answer.choices
    assert isinstance(choice.message.parsed, Pet) and choice.finish_reason == "stop"
    prompt = encode_prompt(port.model.tokenizer, MESSAGES)
    own = drawn | {"constraint": {"json_schema": schema}}
    expected = alone(port.model, prompt, max_new_tokens=150, **own)
    assert choice.message.content == expected.text
    form = {"type": "json_schema", "json_schema": {"name": "Pet", "schema": schema}}
    streamed = ask(client, stream=True, response_format=form)
    pieces = [piece.choices[0].delta.content or "" for piece in streamed]
    assert "".join(pieces) == expected.text and len(pieces) > 3
    with httpx.Client(base_url=port.url) as http:
        steps, drafted = (
            counted(http, f"vllm:spec_decode_num_{kind}_total")
            for kind in ("drafts", "draft_tokens")
        )
    assert drafted == steps * (port.model.tree.n_nodes - 1 + constrained.MANY)


FORMS = [
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_regex": "[0-9]{3}-[a-z]{2}"}, "[0-9]{3}-[a-z]{2}"),
    ({"guided_grammar": 'start: "a" /[xy]{2}/ "b"'}, "a[xy]{2}b"),
    ({"guided_grammar": 'root ::= "a" [xy] "b"'}, "a[xy]b"),
    ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ({"structured_outputs": {"regex": "u{4}"}}, "uuuu"),
]


@pytest.mark.parametrize(("extra", "pattern"), FORMS)
def test_vllms_names(client, extra, pattern):
    text = ask(client, extra_body=extra).choices[0].message.content
    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    "fields",
    [
        # llama.cpp, Together, Anyscale
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"extra_body": {"guided_json": SCHEMA}},
        {"extra_body": {"structured_outputs": {"json": json.dumps(SCHEMA)}}},
    ],
)
def test_schemas_by_the_names_of_other_servers(client, fields):
    assert Pet.model_validate_json(ask(client, **fields).choices[0].message.content)


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_completion_has_a_response_format(client, kind):
    form = {"response_format": {"type": kind, "schema": SCHEMA}}
    asked = {"model": NAME, "prompt": "in", "max_tokens": 90, "extra_body": form}
    assert Pet.model_validate_json(client.completions.create(**asked).choices[0].text)


OWN = {"presence_penalty": 0.5, "frequency_penalty": 1.5, "repetition_penalty": 1.3}


@pytest.mark.wide
def test_neighbours_change_nothing(port, client):
    """Rows with constraints of several kinds, with penalties and biases, and without, together."""
    bias = OWN | {"logit_bias": {5: 3.0, 9: -100}}
    kinds = [({}, {}), (bias, bias)]
    for extra, _ in FORMS[:3]:
        own = {name.removeprefix("guided_"): value for name, value in extra.items()}
        kinds.append(({"constraint": own}, extra))
    asked, expected = [], []
    for i, (own, extra) in enumerate(kinds):
        drawn = {"temperature": 0.9 * (i % 2), "seed": 3}
        asked.append(drawn | {"extra_body": extra})
        result = alone(port.model, "in the hat", max_new_tokens=30, **drawn, **own)
        expected.append(result.text)

    def served(fields):
        fields = fields | {"prompt": "in the hat", "max_tokens": 30}
        return client.completions.create(model=NAME, **fields).choices[0].text

    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(served, asked * 2)) == expected * 2


@pytest.mark.wide
def test_a_text_that_cannot_go_on(port, client):
    """The vocabulary has no é: the answer is marked as incomplete."""
    options = Options(constraint={"regex": "abcé"}, max_new_tokens=9)
    for tree in ("none", None):
        [result] = port.model.generate(["in"], options, tree=tree)
        assert (result.text, result.finish_reason) == ("abc", "constraint")
    [choice] = ask(client, extra_body={"guided_regex": "abcé"}).choices
    assert choice.finish_reason == "length" and choice.message.content == "abc"
    assert choice.medusa["finish_reason"] == "constraint"


def test_rows_whose_masks_are_late_sit_out(port, client, monkeypatch):
    """Others get their texts meanwhile, and theirs are what they would have been."""
    held, true = threading.Event(), Guide.fill
    drawn = {"temperature": 0.9, "seed": 3}
    own = {"max_new_tokens": 20, "constraint": {"regex": "[a-z ]{12}"}}
    expected = alone(port.model, "in the hat", **drawn, **own).text

    def slow(self, into_W):
        if threading.current_thread().name.startswith("guides"):
            held.wait(60)
        return true(self, into_W)

    def answered(**fields):
        fields |= {"model": NAME, "prompt": "in the hat", "timeout": 60}
        return client.completions.create(**drawn, **fields).choices[0].text

    monkeypatch.setattr(Guide, "fill", slow)
    with ThreadPoolExecutor(1) as pool:
        try:
            extra = {"guided_regex": "[a-z ]{12}"}
            late = pool.submit(answered, max_tokens=20, extra_body=extra)
            until(lambda: port.server.busy == 1)
            assert answered(max_tokens=30) and answered(max_tokens=3)
            assert not late.done()
        finally:
            held.set()
        assert late.result() == expected


FEW_ITEMS = 'start: "abc" (' + " | ".join(f'"d{i}"' for i in range(60)) + ")"


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_limits_are_errors(port, http, monkeypatch, slow, stream):
    """Of the grammar engine, or of the time that masks may take. Never an end."""
    body = {"prompt": "in", "max_tokens": 30, "stream": stream, "guided_grammar": FEW_ITEMS}
    if slow:
        body["guided_grammar"] = 'start: "abc" /[a-z]{20}/'
        monkeypatch.setattr(guide, "SLOW_MASK", -1)
        monkeypatch.setattr(server, "SLOW_MASKS", 1e-9)
    else:
        tried = grammars.try_to_compile(constraint_of({"grammar": FEW_ITEMS}))
        monkeypatch.setattr(grammars, "try_to_compile", lambda *_: tried)
        monkeypatch.setitem(grammars.LIMITS, "max_items_in_row", 30)
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == (200 if stream else 400)
    assert answer.text.count('"code": "constraint_too_costly"' if stream else "costly") >= 1
    assert '"finish_reason": "' not in answer.text
    if not slow:
        with pytest.raises(UserError, match="too costly for its grammar engine"):
            constraint = {"grammar": FEW_ITEMS}
            port.model.generate(["in"], Options(constraint=constraint, max_new_tokens=30))


def test_slow_calls_take_turns(monkeypatch):
    """One at a time in the whole process, then a pause as long: others get the interpreter meanwhile."""
    monkeypatch.setattr(guide, "HELD", 0.0)
    spans, shared = [], Patience(100.0)

    def busy():
        start, end = time.perf_counter(), time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        spans.append((start, time.perf_counter()))

    shared.call(busy)  # from now on they are known to be slow
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(shared.call, [busy] * 6))
    spans.sort()
    pauses = [begin - end for (_, end), (begin, _) in pairwise(spans[1:])]
    assert len(pauses) == 5 and min(pauses) >= 0.02


def test_choices_of_a_call_share_their_time(port):
    """Not those of two calls."""
    options = Options(constraint={"regex": "[a-z]{3}"}, max_new_tokens=4)
    with port.held():
        handles = port.server.submit_all([Request("in", options, i) for i in range(3)])
        handles += port.server.submit_all([Request("in", options)])
        jobs = [*port.server._scheduler._jobs.waiting, *port.server._inbox]
        assert len(jobs) == 4 and len({job.guide.patience for job in jobs}) == 2
    for handle in handles:
        assert len(list(handle)[-1].ending.result.text) == 3


@pytest.fixture
def compiling(monkeypatch):
    """Constraints that are compiled now; none is done before the event."""
    begun, done, true = [], threading.Event(), Grammars.guide

    def slow(self, constraint, eos_ids):
        begun.append(constraint.text)
        done.wait(60)
        return true(self, constraint, eos_ids)

    monkeypatch.setattr(Grammars, "guide", slow)
    yield begun, done
    done.set()


def test_calls_without_constraints_wait_for_no_compilation(port, client, compiling):
    """However many calls bring constraints that take long. As many as the queue holds may wait."""
    answers, (_, done) = [], compiling

    def asked(i):
        try:
            answer = ask(client, max_tokens=1, extra_body={"guided_regex": "a" * (i + 1)})
            answers.append(answer.choices[0].message.content)
        except openai.RateLimitError as error:
            assert "6 requests are waiting" in str(error)
            answers.append(None)

    with ThreadPoolExecutor(36) as pool:  # asyncio.to_thread has 32 threads at most
        try:
            for i in range(36):
                pool.submit(asked, i)
            until(lambda: len(answers) == 30)
            text = {"model": NAME, "prompt": "in the hat", "max_tokens": 3, "timeout": 30}
            assert client.completions.create(**text).choices[0].text
            assert answers == [None] * 30
        finally:
            done.set()
    assert len(answers) == 36 and all(answers[30:])


def test_who_has_left_is_not_compiled_for(port, client, compiling):
    begun, done = compiling

    def waits(n):
        until(lambda: port.server.preparing == n)

    def asks(i):
        return raw(port, {"prompt": "in", "max_tokens": 9, "guided_regex": f"b{{{i}}}"})

    first = asks(1)
    waits(1)
    for i in range(2, 2 + QUEUE):
        second = asks(i)
        waits(2)
        second.close()
        waits(1)
    first.close()
    waits(0)
    done.set()
    assert ask(client, extra_body={"guided_regex": "cc"}).choices[0].message.content == "cc"
    assert begun == ["b{1}", "cc"]


def test_compiling_counts_against_the_timeout(port, compiling):
    limits = Limits(seconds=0.3)
    with listening(port.server, limits=limits) as other:
        body = {"prompt": "in", "guided_regex": "d"}
        answer = httpx.post(f"{other.url}/v1/completions", json=body, timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
