"""The official client, as it is, against the port."""

import openai
import pytest
from served import NAME, alone, both, events_of, texts_of

from medusa_jax import Options
from medusa_jax.text.chat import encode_prompt, encode_turns

PATH = "/v1/completions"
MESSAGES = [{"role": "user", "content": "in the hat and the other cat"}]


def test_models(client):
    [model] = client.models.list().data
    assert model.id == NAME and model.medusa["drafter"] == "medusa"
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_chat_whole_and_streamed(port, client, temperature):
    prompt = encode_prompt(port.model.tokenizer, MESSAGES)
    drawn = {"temperature": temperature, "seed": 5}
    expected = alone(port.model, prompt, max_new_tokens=20, **drawn)
    asked = {"model": NAME, "messages": MESSAGES, "max_tokens": 20, **drawn}
    whole = client.chat.completions.create(**asked)
    [choice] = whole.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected.text
    assert choice.finish_reason == "length"
    assert whole.usage.completion_tokens == expected.new_tokens == 20
    assert whole.usage.prompt_tokens == expected.prompt_tokens
    assert choice.medusa["seed"] == 5 and choice.medusa["mean_accepted_length"] > 1
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = client.chat.completions.create(**asked)
    assert last.usage.completion_tokens == 20 and not last.choices
    # Of the same prompt only the last token is read again.
    reused = last.usage.prompt_tokens_details.cached_tokens
    assert reused == expected.prompt_tokens - 1
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == expected.text
    assert len(pieces) > 2 and pieces[0].choices[0].delta.role == "assistant"
    assert [p.choices[0].finish_reason for p in pieces[-2:]] == [None, "length"]
    parts = [part for p in pieces[1:] for part in p.choices[0].medusa["parts"]]
    assert "".join(text for text, _ in parts) == expected.text
    assert {depth for _, depth in parts} >= {0, 1}


@pytest.mark.wide
def test_completions_of_several_prompts_and_choices(port, client, http):
    """Whole, and streamed to a client that reads the headers."""
    prompts, drawn = ["the cat and", port.model.encode("in")], {"temperature": 1, "seed": 3}
    asked = {"model": NAME, "prompt": prompts, "n": 2, "max_tokens": 9, **drawn}
    answer = client.completions.create(**asked)
    options = Options(max_new_tokens=9, **drawn)
    # The number of a choice among those of its prompt takes the place of a request's in a file.
    rows = [prompt for prompt in prompts for _ in range(2)]
    expected = port.model.generate(rows, options, [0, 1, 0, 1], tree="none")
    assert [choice.text for choice in answer.choices] == [r.text for r in expected]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text != answer.choices[1].text
    assert answer.usage.completion_tokens == 36
    read = sum(r.prompt_tokens for r in expected[::2])
    assert answer.usage.prompt_tokens == read
    streamed = http.post(PATH, json=asked | {"stream": True})
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert streamed.headers["cache-control"] == "no-store"
    assert streamed.headers["x-accel-buffering"] == "no"
    events = events_of(streamed.text)
    assert texts_of(events) == {i: result.text for i, result in enumerate(expected)}
    [id] = {event["id"] for event in events}
    assert id.startswith("cmpl-")
    assert {event["object"] for event in events} == {"text_completion"}
    assert not any("usage" in event for event in events)  # not asked for
    choices = [event["choices"][0] for event in events]
    assert sum(choice["medusa"]["tokens"] for choice in choices) == 36
    assert all(choice["logprobs"] is None for choice in choices)
    for index in range(4):
        reasons = [c["finish_reason"] for c in choices if c["index"] == index]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]


def speculative(events):
    """vLLM's figures, which only the last event has; they agree with each other as vLLM's do."""
    assert not any("metrics" in event for event in events[:-1])
    figures = events[-1]["metrics"]["speculative_decoding"]
    mean, rate, histogram, steps, accepted, drafted, most = figures.values()
    assert (sum(histogram), len(histogram)) == (steps, most + 1)
    assert sum(j * n for j, n in enumerate(histogram)) == accepted <= drafted
    assert (mean, rate) == (1 + accepted / steps, accepted / drafted)
    return figures


def test_vllm_s_figures_of_the_drafts(port, http):
    asked = {
        "model": NAME,
        "prompt": "in the hat",
        "max_tokens": 20,
        "temperature": 0,
        "n": 2,
    }
    whole = http.post(PATH, json=asked).json()
    figures, own = speculative([whole]), [c["medusa"] for c in whole["choices"]]
    assert [*figures] == [
        "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps",
        "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens",
    ]  # fmt: skip
    for theirs, ours in {
        "num_spec_steps": "steps",
        "num_accepted_draft_tokens": "accepted_drafts",
    }.items():
        assert figures[theirs] == sum(one[ours] for one in own)
    depth = figures["num_spec_tokens"]
    histograms = figures, *own
    assert depth == port.model.tree.depth
    assert {len(one["acceptance_histogram"]) for one in histograms} == {depth + 1}
    for options in ({}, {"stream_options": {"include_usage": True}}):
        streamed = http.post(PATH, json=asked | options | {"stream": True})
        assert speculative(events_of(streamed.text)) == figures
    assert "metrics" not in http.post(PATH, json=asked | {"drafts": False}).json()


def test_more_prompts_than_the_queue_holds(port, client):
    """They wait together: LangChain sends twenty in a call."""
    prompts = [f"the {word}" for word in ["cat", "hat", "rat", "mat", "bat"]] * 4
    asked = {"model": NAME, "prompt": prompts, "max_tokens": 3, "temperature": 0}
    answer = client.completions.create(**asked, n=2, best_of=2)
    expected = [alone(port.model, prompt, max_new_tokens=3).text for prompt in prompts[:5]]
    texts = [choice.text for choice in answer.choices]
    assert len(prompts) * 2 > 16 > port.server.queue
    assert texts[::2] == texts[1::2] == expected * 4


@pytest.mark.parametrize(
    "turn",
    [
        {"content": None, "refusal": "in the hat"},
        {"content": [{"type": "refusal", "refusal": "in the hat"}]},
    ],
)
def test_a_refusal_comes_back_as_text(client, turn):
    def said(turn):
        ends = [{"role": "user", "content": text} for text in ("the cat", "abc")]
        messages = [ends[0], {"role": "assistant"} | turn, ends[1]]
        asked = {"model": NAME, "messages": messages, "max_tokens": 9, "temperature": 0}
        answer = client.chat.completions.create(**asked)
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    assert said(turn) == said({"content": "in the hat"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_last_turn_of_the_assistant_is_continued(port, client, http, stream):
    """With the space that a sentencepiece tokenizer drops at the beginning of a text."""
    start = alone(
        port.model, encode_prompt(port.model.tokenizer, MESSAGES), max_new_tokens=9
    )
    turns = [*MESSAGES, {"role": "assistant", "content": start.text}]
    fields = {"messages": turns, "temperature": 0, "max_tokens": 9, "stream": stream}
    own = {"continue_final_message": True, "add_generation_prompt": False}
    for extra in ({}, own):
        answer = client.chat.completions.create(model=NAME, **fields, extra_body=extra)
        pieces = (
            [piece.choices[0].delta for piece in answer]
            if stream
            else [answer.choices[0].message]
        )
        text = "".join(piece.content or "" for piece in pieces)
        prompt = encode_turns(port.model.tokenizer, turns, {}, continued=True)
        expected = alone(port.model, prompt, max_new_tokens=9)
        whole = port.model.tokenizer.decode([*prompt, *expected.token_ids])
        assert whole.endswith(start.text + text) and text.endswith(expected.text)
    other = http.post(
        "/v1/chat/completions", json=fields | {"continue_final_message": False}
    ).text
    assert text not in other


def test_a_prediction(port, client):
    """A right one is accepted, and a wrong one changes nothing."""
    asked = {"model": NAME, "messages": MESSAGES, "max_tokens": 30, "temperature": 0}
    plain = client.chat.completions.create(**asked).choices[0]
    right = plain.message.content
    for content, least in ((right, 5), ([{"type": "text", "text": right}], 5), ("zzz", 0)):
        prediction = {"type": "content", "content": content}
        answer = client.chat.completions.create(**asked, prediction=prediction)
        [choice] = answer.choices
        assert choice.message.content == right
        assert choice.medusa["steps"] <= plain.medusa["steps"]
        counts = answer.usage.completion_tokens_details
        accepted, rejected = (
            counts.accepted_prediction_tokens,
            counts.rejected_prediction_tokens,
        )
        text = content if isinstance(content, str) else right
        assert accepted >= least and accepted + rejected == len(port.model.encode(text))
    with pytest.raises(
        openai.BadRequestError, match="'type' in 'prediction' should be content"
    ):
        client.chat.completions.create(**asked, prediction={"type": "x", "content": ""})


CAT = {"model": NAME, "prompt": "the cat", "max_tokens": 20, "temperature": 0}


def test_stop_strings_end_the_text(port, http):
    whole = alone(port.model, "the cat", max_new_tokens=20)
    stop = whole.text[8:10]
    answer = both(http, PATH, **CAT, stop=[stop, "ZZZ"])
    assert answer["text"] == whole.text[: whole.text.index(stop)]
    assert answer["finish_reason"] == "stop"
    cut = alone(port.model, "the cat", max_new_tokens=20, stop=(stop,))
    assert answer["medusa"]["new_tokens"] == cut.new_tokens < whole.new_tokens


def test_a_stop_string_that_is_a_special_token(port, http):
    """Decoding skips it; in Python and over HTTP, not before the least length."""
    likely = {"logit_bias": {"1": 100.0}, "stop": ["<s>", "zzz"]}
    for n in (0, 3):
        answer = both(http, PATH, **CAT, **likely, min_tokens=n)
        assert answer["medusa"]["new_tokens"] == n + 1
        assert (answer["text"], answer["finish_reason"]) == ("", "stop")
    result = port.model.stream("a", Options(20, **likely)).result
    assert (result.finish_reason, result.token_ids) == ("stop", [1])


EOS = 2
LIKELY = {str(EOS): 100}  # every text ends at once


@pytest.mark.wide
@pytest.mark.parametrize("more", [{}, {"acceptance": "rejection"}, {"drafts": False}])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_the_least_length(port, client, temperature, more):
    """Before it a text is that of a vocabulary without ends; then it ends, if that is likeliest."""
    drawn = {"temperature": temperature, "seed": 3}
    asked = {"model": NAME, "prompt": "the cat", "max_tokens": 20, **drawn}
    barred = alone(port.model, "the cat", max_new_tokens=7, logit_bias={EOS: -100}, **drawn)
    for n in (0, 1, 7):
        own = {"min_tokens": n, "logit_bias": LIKELY, **more}
        answer = client.completions.create(**asked, extra_body=own)
        assert answer.usage.completion_tokens == n + 1
        [choice] = answer.choices
        assert choice.finish_reason == "stop"
        if "acceptance" not in more:  # whose draws are others
            assert choice.text == port.model.tokenizer.decode(barred.token_ids[:n])
    own = {"ignore_eos": True, "logit_bias": LIKELY, **more}
    answer = client.completions.create(**asked, extra_body=own)
    assert answer.usage.completion_tokens == 20
    assert answer.choices[0].finish_reason == "length"


def test_stop_token_ids(port, http):
    """As in vLLM: they end the text, theirs is cut off, and none comes before the least length."""
    ids = alone(port.model, "the cat", max_new_tokens=20).token_ids
    at = max(ids.index(i) for i in ids)
    # More of them than a row has room for on the device.
    own = {"stop_token_ids": [ids[at], *(i for i in range(30) if i not in ids)]}
    answer = both(http, PATH, **CAT, **own)
    assert answer["text"] == port.model.tokenizer.decode(ids[:at])
    assert answer["finish_reason"] == "stop"
    assert answer["medusa"]["new_tokens"] == at + 1
    bars = dict.fromkeys(own["stop_token_ids"], -100)
    barred = alone(port.model, "the cat", max_new_tokens=at + 3, logit_bias=bars)
    least = {"max_tokens": at + 3, "min_tokens": at + 3}
    assert both(http, PATH, **CAT | own | least)["text"] == barred.text


def test_stop_strings_before_the_least_length(port, http):
    whole = alone(port.model, "the cat", max_new_tokens=20)
    first, n = whole.text[1], 4
    short = both(http, PATH, **CAT, stop=first)["text"]
    answer = both(http, PATH, **CAT, stop=first, min_tokens=n)
    kept = port.model.tokenizer.decode(whole.token_ids[:n])
    rest = whole.text.removeprefix(kept)
    assert answer["text"] == kept + rest.partition(first)[0] != short


def test_our_own_fields(port, client):
    asked = {"model": NAME, "prompt": "in", "max_tokens": 15, "temperature": 1, "seed": 2}
    options = {"max_new_tokens": 15, "temperature": 1, "seed": 2}
    own = {"top_k": 4, "min_p": 0.05}
    expected = alone(port.model, "in", **options, **own)
    for drafts, nodes in ((True, 5), (False, 1)):
        answer = client.completions.create(**asked, extra_body=own | {"drafts": drafts})
        [choice] = answer.choices
        assert choice.text == expected.text and choice.medusa["tree_nodes"] == nodes
    free = client.completions.create(**asked | {"seed": None})
    again = alone(port.model, "in", **options | {"seed": free.choices[0].medusa["seed"]})
    assert free.choices[0].text == again.text
