"""`distill --server`: answers of an API, resumed and refused; what it needs is checked before."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from files import read_lines, write_lines
from tiny import write_ending_model

from medusa_jax.commands import distill
from medusa_jax.text.tokenizer import load_tokenizer


class API(BaseHTTPRequestHandler):
    """Answers "the cat" in the form of OpenAI's reference; refuses questions with "refuse"."""

    calls: list = []  # noqa: RUF012

    def do_GET(self):
        self.send({"object": "list", "data": [{"id": "the-model", "object": "model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.calls.append((body, self.headers.get("Authorization")))
        if body["messages"][-1]["content"] == "refuse":
            return self.send({"error": {"message": "too long"}}, 400)
        message = {"role": "assistant", "content": "the cat"}
        names = {"in a bar": "reasoning_content", "the": "reasoning"}
        if name := names.get(body["messages"][-1]["content"]):
            message[name] = "a cat in the bar\n"
        finish = "length" if "cut" in body["messages"][-1]["content"] else "stop"
        return self.send(
            {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}
        )

    def send(self, reply, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), API)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    API.calls.clear()
    yield f"http://127.0.0.1:{server.server_port}/v1/"
    server.shutdown()


def test_a_server_answers(url, tmp_path, monkeypatch, capsys):
    """Each question once, its turns in order; a resumed run asks for the rest, of the same model only."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    write_ending_model(tmp_path / "m")
    asked = [["in a bar", "and"], ["refuse"], ["a cut"], ["the"]]
    seeds = write_lines(tmp_path / "seeds.jsonl", ({"turns": turns} for turns in asked))
    out = tmp_path / "out"
    flags = [f"--model={tmp_path / 'm'}", f"--prompts={seeds}", f"--out={out}"]
    flags += [f"--server={url}", "--seed=5"]
    assert distill.main([*flags, "--mode=self_talk"]) == 2
    assert distill.main(flags) == 0
    said = capsys.readouterr().err
    assert "--server answers questions" in said and "too long" in said
    assert f"the answers are the text of the-model at {url[:-1]}" in said
    lines = read_lines(out / "messages.jsonl")
    assert [len(line["messages"]) for line in lines] == [4, 1, 2, 2]
    assert [line.get("cut", False) for line in lines] == [False, False, True, False]
    answer = {"role": "assistant", "content": "the cat"}
    assert lines[0]["messages"][3] == answer
    thought = answer | {"reasoning_content": "a cat in the bar"}
    assert lines[0]["messages"][1] == lines[3]["messages"][1] == thought
    counts = [a["tokens"] for line in lines for a in line["answers"]]
    encode = load_tokenizer(str(tmp_path / "m")).encode
    short, more = len(encode("the cat")), len(encode("a cat in the bar"))
    assert counts == [short + more, short, short, short + more]
    bodies = [body for body, key in API.calls if key == "Bearer secret"]
    assert len(bodies) == 5 and {body["model"] for body in bodies} == {"the-model"}
    [second] = [body for body in bodies if len(body["messages"]) == 3]
    first, _, third, _ = lines[0]["messages"]
    assert second["seed"] == 5 and second["messages"] == [first, answer, third]
    assert second["temperature"] == 0.3 and second["max_tokens"] == 200
    path = out / "messages.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    API.calls.clear()
    assert distill.main(flags) == 0
    assert len(API.calls) == 1 and path.read_bytes() == whole
    # All differences at once, and not the batch size.
    assert distill.main([*flags[:4], "--top_p=0.5", "--batch_size=3"]) == 2
    assert "top_p 1.0, now it is 0.5; seed 5, now it is 0: use" in capsys.readouterr().err


def test_a_server_that_is_not_there(tmp_path, capsys):
    write_ending_model(tmp_path / "m")
    seeds = write_lines(tmp_path / "seeds.jsonl", [{"turns": ["a"]}])
    flags = [f"--model={tmp_path / 'm'}", f"--prompts={seeds}", f"--out={tmp_path / 'out'}"]
    assert distill.main([*flags, "--server=http://127.0.0.1:9/v1"]) == 2
    assert (
        "error: http://127.0.0.1:9/v1/models does not answer as OpenAI's API: "
        in capsys.readouterr().err
    )
