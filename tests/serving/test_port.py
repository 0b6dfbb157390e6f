"""The port itself: its key, its metrics."""

import re

from served import ASKED, counted


def test_a_key(other):
    for sent in ({}, {"authorization": "Bearer no"}):
        for path in ("/v1/models", "/metrics"):
            assert other("GET", path, key="open sesame", headers=sent).status_code == 401
        refused = other("POST", "/v1/completions", key="k", headers=sent, json={})
        assert (
            refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        )
    for path in ("/", "/health"):
        assert other("GET", path, key="k").status_code == 200
    right = {"authorization": "Bearer open sesame"}
    assert other("GET", "/v1/models", key="open sesame", headers=right).status_code == 200
    for sent, status in (("clé", 200), ("cle", 401)):  # byte by byte, as `curl` sends it
        given = {"authorization": b"Bearer " + sent.encode()}
        assert other("GET", "/v1/models", key="clé", headers=given).status_code == status


def test_metrics_count_what_was_done(http):
    """Under vLLM's names where it has one; no metric has a `_created` series."""
    names = [
        'medusa_calls_total{endpoint="completions",status="200"}',
        "vllm:prompt_tokens_total",
        "medusa_reused_tokens_total",
        "vllm:generation_tokens_total",
        'vllm:request_success_total{finished_reason="length"}',
        "medusa_steps_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "vllm:request_queue_time_seconds_count",
        "vllm:time_to_first_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_time_per_output_token_seconds_count",
    ]
    before = [counted(http, name) for name in names]
    answer = http.post("/v1/completions", json=ASKED | {"n": 2}).json()
    after = [counted(http, name) for name in names]
    own = [choice["medusa"] for choice in answer["choices"]]
    steps, accepted, reused = (
        sum(one[name] for one in own)
        for name in ("steps", "accepted_drafts", "reused_tokens")
    )
    read = answer["usage"]["prompt_tokens"]
    assert answer["usage"]["total_tokens"] == read + 120
    grown = [new - old for old, new in zip(before, after, strict=True)]
    expected = [1, 2 * read, reused, 120, 2, steps, steps, accepted, accepted, 2, 2, 2, 2]
    assert grown == expected and accepted > 0
    said = http.get("/metrics").text
    assert "_created" not in said
    assert counted(http, "medusa_slots ") == 3
    assert counted(http, "vllm:num_requests_running") == 0


def test_the_log(other, capfd):
    """A line for what is refused, whole or streamed, and for every call only if asked for."""
    for log_all in (False, True):
        for more in ({"n": 0}, {}, {"stream": True}):
            other("POST", "/v1/completions", log_all=log_all, json=ASKED | more)
    said = [line[9:] for line in capfd.readouterr().err.splitlines() if "POST" in line]
    refused = "POST /v1/completions 400: 'n' should be from 1 to 16, not 0, after "
    assert [line.startswith(refused) for line in said] == [True, True, False, False]
    assert all(re.search(r"200: \d+ \+ 60 tokens, the first", line) for line in said[2:])


def test_what_breaks_is_told_and_counted(port, http, monkeypatch):
    """Without the reason, which is internal."""
    broken = 'medusa_calls_total{endpoint="completions",status="500"}'

    def submit_all(*asked):
        raise RuntimeError("secret")

    monkeypatch.setattr(port.server, "submit_all", submit_all)
    before = counted(http, broken)
    closed = {"connection": "close"}  # which it would be without a word
    answer = http.post("/v1/completions", json=ASKED, headers=closed)
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"
    assert counted(http, broken) == before + 1


def test_names_of_the_host(other):
    """A name that another site has resolve to this machine is refused, page and all."""
    hosts = ["localhost", "127.0.0.1", "::1", "[::1]"]
    for host in (
        "localhost",
        "localhost:8000",
        "127.0.0.1:8000",
        "[::1]:8000",
        "LOCALHOST",
    ):
        sent = {"headers": {"host": host}, "hosts": hosts}
        assert other("GET", "/health", **sent).status_code == 200
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", ""):
        sent = {"headers": {"host": host}, "hosts": hosts}
        for path in ("/", "/health", "/v1/models"):
            assert other("GET", path, **sent).status_code == 400
    assert other("GET", "/health", headers={"host": "a.example"}).status_code == 200
