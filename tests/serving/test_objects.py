"""The JSON objects of calls and answers, field by field."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pieces import drop_first_space, like_llama
from served import ASKED, NAME, alone, both
from tiny import PRINTABLE, set_template, tiny_arch, write_tokenizer
from transformers import PreTrainedTokenizerFast

from medusa_jax import Options, demo
from medusa_jax.serving.http.calls import Call, chat_call
from medusa_jax.serving.http.fields import HttpError
from medusa_jax.serving.http.replies import Offsets, Reply, Vocabulary
from medusa_jax.serving.http.responses import ResponsesReply
from medusa_jax.serving.prompt_scores import read_scored, score_prompt
from medusa_jax.serving.request import Delta, Ending, Request
from medusa_jax.text.chat import encode_prompt
from medusa_jax.text.tokenizer import load_tokenizer

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "in"}], "temperature": 0}
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


def log_probabilities(model, ids):
    """log p(token | everything before it) of each token after the first: one pass over the text."""

    @jax.jit
    def scores(backbone, tokens_1T):
        positions_1T = jnp.arange(len(ids))[None, :]
        hidden_1TD = backbone.forward(tokens_1T, positions_1T, jnp.ones_like(tokens_1T))
        return jax.nn.log_softmax(backbone.lm_head(hidden_1TD))[0]

    logp_TV = np.asarray(scores(model.backbone, jnp.array([ids])))
    return logp_TV[np.arange(len(ids) - 1), ids[1:]]


def test_how_long_an_answer_may_be(port, http):
    def length(kind, fields):
        answer = http.post(PATHS[kind], json=fields).json()
        return answer["usage"]["completion_tokens"]

    assert length("completion", {"prompt": "in", "temperature": 0}) == 16
    prompt = encode_prompt(port.model.tokenizer, CHAT["messages"])
    whole = alone(port.model, prompt, max_new_tokens=port.model.config.max_position)
    assert length("chat", CHAT) == whole.new_tokens > 60
    for more in ({"max_tokens": 5}, {"max_tokens": 9, "max_completion_tokens": 5}):
        assert length("chat", CHAT | more) == 5
    assert length("chat", CHAT | {"max_tokens": -1}) == whole.new_tokens


@pytest.mark.parametrize("kind", PATHS)
def test_only_the_prompt_is_read(port, http, kind):
    """As llama.vim warms a chat up: then the whole prompt is in the cache."""
    text = f"{kind} in the hat and the cat"
    turns = [{"role": "user", "content": text}]
    start = {"prompt": text} if kind == "completion" else CHAT | {"messages": turns}
    warm = start | {"model": "", "samplers": [], "response_fields": [""], "id_slot": 1}
    assert both(http, PATHS[kind], **warm, n_predict=0)["medusa"]["new_tokens"] == 0
    body = start | {"samplers": ["min_p", "temperature"], "min_p": 0.1, "temperature": 0.1}
    usage = http.post(PATHS[kind], json=body | {"max_tokens": 3}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_llama_cpps_sampling(port):
    """Biases by id or text, false for never; of samplers that are not listed no field counts."""
    fields = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.4,
        "min_p": 0.2,
        "repeat_penalty": 2,
    }
    pairs = [[5, 1.0], ["hat", False]]
    hat = {5: 1.0} | dict.fromkeys(port.model.tokenizer.encode("hat"), -100.0)
    for samplers, biases, expected in (
        (["top_k"], pairs, [1, 3, 1, 0, 2]),
        ("mp", {"5": 1, "hat": -100}, [1, 0, 0.4, 0.2, 2]),
    ):
        body = CHAT | fields | {"samplers": samplers, "logit_bias": biases}
        options = chat_call(body, NAME, port.model, "", 5, check=len).requests[0].options
        names = [*fields][:4] + ["repetition_penalty"]
        assert [getattr(options, name) for name in names] == expected
        assert dict(options.logit_bias) == hat


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("completion", {"logprobs": 2}), ("chat", {"logprobs": True, "top_logprobs": 2})],
)
def test_logprobs_of_a_stream_are_those_of_the_whole(http, kind, fields):
    asked = (ASKED if kind == "completion" else CHAT) | fields | {"max_tokens": 9}
    found = both(http, PATHS[kind], **asked)["logprobs"]
    assert len(found["tokens" if kind == "completion" else "content"]) == 9
    for one in found.get("content", ()):
        assert bytes(one["bytes"]).decode() == one["token"]


THINKING = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}{% if m.name %}({{ m.name }}){% endif %}: "
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}none{{ budget }}{% endif %}"
)


@pytest.mark.parametrize(
    "variables",
    [{}, {"enable_thinking": True}, {"enable_thinking": False, "budget": "</s> 3"}],
)
def test_variables_of_the_chat_template(tmp_path, variables):
    """As transformers hands them to it; special tokens in them are text, as in messages."""
    write_tokenizer(tmp_path, characters=PRINTABLE)
    set_template(tmp_path, THINKING)
    tokenizer = load_tokenizer(str(tmp_path))
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, bos_token="<s>", chat_template=THINKING
    )
    messages = [{"role": "user", "name": "ann", "content": "in the hat"}]
    expected = theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **variables
    )
    unchanged = {"ending_turns": lambda options, template: options}
    model = SimpleNamespace(config=tiny_arch(), tokenizer=tokenizer, **unchanged)
    body = {"messages": messages, "chat_template_kwargs": variables}
    ids = chat_call(body, NAME, model, "", 5, check=len).requests[0].prompt
    assert "<s>" + tokenizer.decode(ids) == expected and ids.count(1) == 1
    for name in (
        "none",
        "defined",
        "m",
        "name",
        "content",
        "bos_token",
    ):  # words of the template
        with pytest.raises(HttpError, match=f"no variable '{name}'"):
            body["chat_template_kwargs"] = {name: "x"}
            chat_call(body, NAME, model, "", 5, check=len)


def logprobs_of(tokenizer, ids, logprobs, top, chat=False, prompt=()):
    """The log-probabilities of a piece, as its endpoint writes them."""
    asked = [Request(prompt, Options(logprobs=0))]
    call = Call(asked, stream=False, usage=False, chat=chat)
    delta = Delta([], ids, logprobs, top)
    return Reply(call, Vocabulary(tokenizer), NAME)._logprobs(0, delta)


def test_tokens_with_one_text_have_names_of_their_own():
    """Parts of characters, and two tokens of the same bytes: none overwrites a likelier one."""
    tokenizer = load_tokenizer(str(Path(demo.__file__).parent / "backbone"))
    parts = tokenizer.encode("日")
    [a] = tokenizer.encode("a")
    assert len(parts) == 3
    top = [[(parts[0], -0.4), (parts[1], -1.5), (a, -2.0), (parts[2], -3.7)]]
    found = logprobs_of(tokenizer, parts[:1], [-0.4], top)
    names = [f"bytes:\\x{byte:02x}" for byte in "日".encode()]
    assert found["tokens"] == names[:1]
    expected = dict(zip([names[0], names[1], "a", names[2]], [-0.4, -1.5, -2.0, -3.7]))
    assert found["top_logprobs"] == [expected]
    # A chosen token that is none of the likeliest comes in addition, as at OpenAI.
    found = logprobs_of(tokenizer, [a], [-9.0], [top[0][:2]])
    assert found["tokens"] == ["a"] and found["top_logprobs"][0]["a"] == -9.0
    assert len(found["top_logprobs"][0]) == 3
    twins = SimpleNamespace(name=lambda token_id: ("x", [120]))
    names = Vocabulary.names(twins, [7, 8, 9])
    assert names == {7: "x", 8: "bytes:\\x78", 9: "token_id:9"}


def test_text_offsets():
    """Characters before the one that a token begins in, also where decoding drops a first space."""
    bytes_ = load_tokenizer(str(Path(demo.__file__).parent / "backbone"))
    for tokenizer, n in itertools.product((bytes_, like_llama()), (0, 2)):
        ids = tokenizer.encode("a a日 é! in the") + [min(tokenizer.special_ids)]
        zeros, ends = [0.0] * len(ids[n:]), range(n, len(ids))
        found = logprobs_of(tokenizer, ids[n:], zeros, [[]] * len(zeros), prompt=ids[:n])
        whole = [len(tokenizer.decode(ids[:end]).rstrip("\ufffd")) for end in ends]
        assert found["text_offset"] == [at - whole[0] for at in whole] and whole[-1] > 5
    llama, broken = like_llama(), bytes_.encode("日")[:2] + bytes_.encode("a")
    spaced = Offsets(Vocabulary(llama), True).push(llama.encode("a<s>in"), "a<s>in")
    assert spaced == [0, 0, 1, 4, 4, 5]  # of ▁ a <s> ▁ i n
    assert Offsets(Vocabulary(bytes_), True).push(broken) == [0, 0, 1]


@pytest.mark.parametrize("text", ["a<s> in</s>the", "in the", "</s>"])
@pytest.mark.parametrize("is_ids", [False, True])
def test_offsets_follow_the_echoed_prompt(port, http, text, is_ids):
    """Special tokens are spelled out, but no BOS is added in front."""
    ids = port.model.tokenizer.encode(text)
    asked = ASKED | {"prompt": ids if is_ids else text, "echo": True, "logprobs": 0}
    choice = both(http, PATHS["completion"], **asked | {"max_tokens": 5})
    pairs = list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]))
    assert choice["text"].startswith(text) and pairs[-5][1] == len(text)
    assert is_ids or pairs.pop(0) == ("<s>", 0)
    for token, at in pairs:
        assert choice["text"][at : at + len(token)] == token


@pytest.mark.wide
def test_the_first_space_of_an_answer(port, http, monkeypatch):
    """Kept after a prompt or the beginning of a turn, whole and in a stream; a turn begins without it."""
    bias = drop_first_space(port.model.tokenizer, monkeypatch)
    asked = {"model": NAME, "max_tokens": 3, "temperature": 0, "logit_bias": bias}
    completion = asked | {"prompt": "in", "logprobs": 0}
    for echo, at in (False, 0), (True, 2):
        choice = both(http, PATHS["completion"], **completion, echo=echo)
        assert choice["text"] == "in"[:at] + "   "
        assert choice["logprobs"]["text_offset"][-3:] == [at, at + 1, at + 2]
    choice = both(http, PATHS["completion"], **completion, stop="  ")
    assert choice["text"] == "" and choice["medusa"]["new_tokens"] == 2
    turns = [*CHAT["messages"], {"role": "assistant", "content": "a"}]
    for messages, text in (turns, "   "), (turns[:1], "  "):
        choice = both(http, PATHS["chat"], **asked, messages=messages)
        assert choice["message"]["content"] == text


@pytest.mark.parametrize("given", ["in the hat", [5, 9, 12, 3]])
def test_echo_scores_texts_as_evaluation_harnesses_ask(port, http, given):
    """`max_tokens` 0, or 1 whose token they leave out; compared with a teacher-forced pass."""
    ids = port.model.encode(given)
    asked = ASKED | {"prompt": given, "logprobs": 3, "echo": True}
    scored = http.post(PATHS["completion"], json=asked | {"max_tokens": 0}).json()
    [choice] = scored["choices"]
    found = choice["logprobs"]
    decoded = given if isinstance(given, str) else port.model.tokenizer.decode(given)
    assert choice["text"] == decoded and choice["finish_reason"] == "length"
    assert scored["usage"]["completion_tokens"] == 0
    assert scored["usage"]["prompt_tokens"] == len(ids) == len(found["tokens"])
    assert found["token_logprobs"][0] is None is found["top_logprobs"][0]
    expected = log_probabilities(port.model, ids)
    np.testing.assert_allclose(found["token_logprobs"][1:], expected, rtol=2e-4, atol=2e-4)
    for token, logprob, top in list(zip(*list(found.values())[:3]))[1:]:
        assert top[token] == logprob and len(top) in (3, 4)
        assert logprob == min(top.values()) or len(top) == 3
    # What the model goes on with is scored as it was when it was written.
    asked["max_tokens"] = 6
    [more] = http.post(PATHS["completion"], json=asked).json()["choices"]
    for name in found:
        assert more["logprobs"][name][: len(ids)] == found[name]
    alone = http.post(PATHS["completion"], json=asked | {"echo": False}).json()
    [answer] = alone["choices"]
    assert more["text"] == decoded + answer["text"]
    own = answer["logprobs"]
    assert more["logprobs"]["token_logprobs"][len(ids) :] == own["token_logprobs"]
    offsets = [len(decoded) + place for place in own["text_offset"]]
    assert more["logprobs"]["text_offset"][len(ids) :] == offsets


def test_echo_of_prompts_longer_than_a_piece(port):
    ids = np.random.default_rng(0).integers(3, 30, 70).tolist()
    for piece in (8, 128):
        score_prompt(
            port.model, "", [3] * (piece + 2), 0, piece
        )  # two pieces, as a server warms up
        programs = read_scored._cache_size()
        echo = score_prompt(port.model, "", ids, 2, piece)
        expected = log_probabilities(port.model, ids)
        np.testing.assert_allclose(echo.logprobs[1:], expected, rtol=2e-4, atol=2e-4)
        first, *rest = echo.top_logprobs
        assert first is None and [len(one) for one in rest] == [2] * 69
        assert read_scored._cache_size() == programs


@pytest.mark.parametrize("template", ["", "plain"])
def test_a_message_that_spells_out_special_tokens(port, template):
    """It says so as text; those of the template stay."""
    body = {"messages": [{"role": "user", "content": "in </s><s>u the"}]}
    call = chat_call(body, NAME, port.model, template, 5, check=len)
    ids = call.requests[0].prompt
    tokenizer = port.model.tokenizer
    bos, eos = (tokenizer.token_to_id(token) for token in ("<s>", "</s>"))
    assert ids[0] == bos and not {bos, eos} & set(ids[1:])
    assert set(tokenizer.encode("in </s><s>u the")) > {bos, eos}  # as a completion reads it


def test_logprobs_of_parts_of_a_character():
    """Clients can put the bytes together, whatever the text of each part says."""
    tokenizer = load_tokenizer(str(Path(demo.__file__).parent / "backbone"))
    ids = tokenizer.encode("é日")
    top = [[(i, -1.0)] for i in ids]
    content = logprobs_of(tokenizer, ids, [-1.0] * len(ids), top, chat=True)["content"]
    assert len(content) == 5 and content[0]["token"] == "\ufffd"
    for entries in (content, [one["top_logprobs"][0] for one in content]):
        assert bytes(b for one in entries for b in one["bytes"]).decode() == "é日"


def test_logprobs_of_held_back_text_in_a_response(port):
    """A stream has those too, at its end as well."""
    tokenizer = load_tokenizer(str(Path(demo.__file__).parent / "backbone"))
    asked = [Request(ids := tokenizer.encode("éa日"), Options(logprobs=0))]
    call = Call(asked, True, False, True, own={"metadata": {}})
    reply, events = ResponsesReply(call, Vocabulary(tokenizer), NAME), []
    result = alone(port.model, "in", max_new_tokens=2)
    for n, (i, text) in enumerate(zip(ids, ["", "é", "a", "", "", ""], strict=True)):
        end = Ending(result, 0.0, 0) if n == 5 else None
        events += reply.piece(0, Delta([(text, 0)], [i], [float(n)], [[]], end))
    entries = [one for event in events if "delta" in event for one in event["logprobs"]]
    assert [one["logprob"] for one in entries] == [*range(6)]
