"""Biases and penalties over the port, with neighbours that ask for none."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from served import NAME, alone

OWN = {
    "presence_penalty": 0.5,
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.3,
    "logit_bias": {"5": 3.0, "9": -100},
}


@pytest.fixture
def client(port):
    with openai.OpenAI(base_url=port.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def test_the_text_is_that_of_plain_decoding_with_any_neighbour(port, client):
    kinds = []
    for i, temperature in enumerate([0, 0.9, 0, 0.8]):
        asked = {"temperature": temperature, "seed": i, "max_tokens": 25}
        kinds.append((asked, OWN if i < 2 else {}))

    def ask(kind):
        asked, own = kind
        answer = client.completions.create(
            model=NAME, prompt="in the hat", **asked, extra_body=own
        )
        return answer.choices[0].text

    expected = []
    for asked, own in kinds:
        fields = asked | own | {"max_new_tokens": asked["max_tokens"]}
        del fields["max_tokens"]
        if own:
            fields["logit_bias"] = {int(i): b for i, b in own["logit_bias"].items()}
        expected.append(alone(port.model, "in the hat", **fields).text)
    assert len(set(expected)) == 4
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, kinds * 2)) == expected * 2


@pytest.mark.parametrize(
    ("fields", "about"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "from -100 to 100"),
        ({"logit_bias": {"five": 1}}, "numbers by token id"),
        ({"logit_bias": {"5": True}}, "numbers by token id"),
        ({"logit_bias": {"100000": 1}}, "outside the vocabulary"),
        ({"logit_bias": {"-1": 1}}, "token id"),
        ({"logit_bias": [5]}, "logit_bias"),
    ],
)
def test_what_is_refused(http, fields, about):
    answer = http.post("/v1/completions", json={"prompt": "in", "max_tokens": 2} | fields)
    assert answer.status_code == 400 and about in answer.json()["error"]["message"]
