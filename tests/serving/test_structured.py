"""Constrained answers over the port, asked for by the official client as it is."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pydantic
import pytest
import tiny
from served import NAME, alone, load_model, port_of
from tiny import TEMPLATE

from medusa_jax import Options
from medusa_jax.interop.chat import encode_prompt

pytest.importorskip("llguidance")

MESSAGES = [{"role": "user", "content": "Name a pet."}]
PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"


class Pet(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=4)
    age: int = pydantic.Field(ge=0, le=30)
    kind: Literal["cat", "dog"]


SCHEMA = Pet.model_json_schema() | {"additionalProperties": False}


@pytest.fixture(scope="module")
def json_port(tmp_path_factory):
    """A model whose vocabulary can write JSON."""
    path = tmp_path_factory.mktemp("structured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "CHARACTERS", PRINTABLE)
        patch.setattr(tiny, "CONTEXT", 512)
        tiny.write_model(path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    with port_of(load_model(path)) as port:
        yield port
        port.wait_idle()


@pytest.fixture
def client(json_port):
    url = json_port.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


def ask(client, **fields):
    asked = {"model": NAME, "messages": MESSAGES, "max_tokens": 150, "temperature": 0.8}
    return client.chat.completions.create(**asked | {"seed": 1} | fields)


def test_a_pydantic_model_is_parsed(json_port, client):
    answer = client.chat.completions.parse(
        model=NAME,
        messages=MESSAGES,
        max_tokens=150,
        temperature=0.8,
        seed=1,
        response_format=Pet,
    )
    [choice] = answer.choices
    assert isinstance(choice.message.parsed, Pet) and choice.finish_reason == "stop"
    from openai.lib._pydantic import to_strict_json_schema

    expected = alone(
        json_port.model,
        encode_prompt(json_port.model.tokenizer, MESSAGES),
        max_new_tokens=150,
        temperature=0.8,
        seed=1,
        constraint={"json_schema": to_strict_json_schema(Pet)},
    )
    assert choice.message.content == expected.text
    streamed = ask(
        client,
        stream=True,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "Pet", "schema": to_strict_json_schema(Pet)},
        },
    )
    pieces = [piece.choices[0].delta.content or "" for piece in streamed]
    assert "".join(pieces) == expected.text and len(pieces) > 3


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
    "extra", [{"guided_json": SCHEMA}, {"structured_outputs": {"json": json.dumps(SCHEMA)}}]
)
def test_vllms_names_of_schemas(client, extra):
    text = ask(client, extra_body=extra).choices[0].message.content
    assert Pet.model_validate_json(text)
    done = client.completions.create(
        model=NAME, prompt="pet: ", max_tokens=150, seed=2, extra_body=extra
    )
    assert Pet.model_validate_json(done.choices[0].text)


def test_neighbours_change_nothing(json_port, client):
    """Rows with constraints of several kinds, and rows without, at the same time."""
    kinds = [extra for extra, _ in FORMS[:3]] + [{}, {"presence_penalty": 1.0}]
    names = {
        "guided_choice": "choice",
        "guided_regex": "regex",
        "guided_grammar": "grammar",
    }

    def served(extra):
        fields = {"prompt": "in the hat", "max_tokens": 30, "temperature": 0.9, "seed": 3}
        answer = client.completions.create(model=NAME, **fields, extra_body=extra)
        return answer.choices[0].text

    expected = []
    for extra in kinds:
        own = {
            ("constraint" if k in names else k): ({names[k]: v} if k in names else v)
            for k, v in extra.items()
        }
        options = {"max_new_tokens": 30, "temperature": 0.9, "seed": 3} | own
        expected.append(alone(json_port.model, "in the hat", **options).text)
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(served, kinds * 2)) == expected * 2


@pytest.mark.parametrize(
    ("fields", "about"),
    [
        ({"response_format": {"type": "xml"}}, "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "'json_schema'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "no 'schema'",
        ),
        ({"guided_regex": "(a"}, "invalid regex"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"guided_choice": []}, "choice should be"),
        (
            {"guided_json": {"minimum": 3, "maximum": 1, "type": "integer"}},
            "cannot be used",
        ),
        ({"guided_regex": "\\p{Han}+"}, "cannot be met"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "one constraint"),
        ({"structured_outputs": {"xml": 1}}, "unknown field 'xml'"),
        ({"guided_jsn": {}}, "did you mean 'guided_json'"),
    ],
)
def test_what_is_refused(client, fields, about):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, extra_body=fields)
    assert about in error.value.message and "\n" not in error.value.message


def test_a_text_that_cannot_go_on(json_port, client):
    """The vocabulary has no é: the answer is told as one that is not whole."""
    for tree in ("none", None):
        [result] = json_port.model.generate(
            ["in"], Options(constraint={"regex": "abcé"}, max_new_tokens=9), tree=tree
        )
        assert (result.text, result.finish_reason) == ("abc", "constraint")
    [choice] = ask(client, extra_body={"guided_regex": "abcé"}).choices
    assert choice.finish_reason == "length" and choice.message.content == "abc"
    assert choice.medusa["finish_reason"] == "constraint"


def test_hostile_constraints_harm_nobody_else(json_port, client):
    """Every one is answered or refused soon, while others get their texts."""
    many = {f"a{i}": {} for i in range(3000)}
    hostile = [
        {"guided_regex": "(a?){50}(a){50}"},
        {"guided_regex": "((a{1,100}){1,100}){1,100}"},
        {"guided_regex": "(" * 3000},
        {"guided_json": {"type": "object", "properties": many, "required": list(many)}},
        {"guided_json": {"allOf": [{"anyOf": [{"properties": many}] * 5}] * 5}},
        {"guided_json": {"$ref": "#"}},
        {"guided_grammar": "start: start start | /a/"},
        {"guided_grammar": "start: " + "(" * 5000},
    ]
    expected = alone(
        json_port.model, "in the hat", max_new_tokens=40, temperature=0.9, seed=3
    ).text

    def attack(extra):
        try:
            ask(client, max_tokens=10, extra_body=extra, timeout=60)
        except openai.BadRequestError as error:
            assert "\n" not in error.message

    def neighbour(_):
        fields = {"prompt": "in the hat", "max_tokens": 40, "temperature": 0.9, "seed": 3}
        try:
            return client.completions.create(model=NAME, **fields).choices[0].text
        except openai.RateLimitError:  # the queue of the test's server is short
            return expected

    with ThreadPoolExecutor(3) as pool:
        attacks = [pool.submit(attack, extra) for extra in hostile]
        texts = [pool.submit(neighbour, i) for i in range(6)]
        assert {one.result() for one in texts} == {expected}
        for one in attacks:
            assert one.result() is None
