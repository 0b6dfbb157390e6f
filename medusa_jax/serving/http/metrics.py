"""Counters for Prometheus, under vLLM's names where the meaning is the same, else under `medusa_`."""

from collections.abc import Callable
from functools import partial

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from medusa_jax.serving.request import Ending
from medusa_jax.serving.server import Server

# From a step of a small model to a long answer of a large one.
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
# Metrics of `Learner.facts`.
FACTS = {
    "answers": "answers that heads have learned from or were tested on",
    "steps": "training steps of the adapter",
    "before": "mean accepted length of held-out answers with the loaded heads",
    "after": "mean accepted length of held-out answers with the adapter",
}


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, server: Server) -> None:
        self.registry = CollectorRegistry()
        prometheus_client.disable_created_metrics()  # a `_created` series for each

        def count(name: str, doc: str, *labels: str) -> Counter:
            return Counter(name, doc, labels, registry=self.registry)

        def watch(name: str, doc: str) -> Histogram:
            return Histogram(name, doc, buckets=SECONDS, registry=self.registry)

        def show(name: str, doc: str, value: Callable[[], float]) -> None:
            Gauge(name, doc, registry=self.registry).set_function(value)

        spec = "vllm:spec_decode_num_"
        self.calls = count("medusa_calls", "by endpoint and status", "endpoint", "status")
        self.cancelled = count("medusa_cancelled", "choices that were not answered whole")
        self._reused = count("medusa_reused_tokens", "of prompts, not computed again")
        self._steps = count("medusa_steps", "by tokens appended", "appended")
        self._ended = count("vllm:request_success", "ended choices", "finished_reason")
        self._prompt = count("vllm:prompt_tokens", "tokens of prompts")
        self._written = count("vllm:generation_tokens", "tokens written")
        self._drafts = count(spec + "drafts", "steps that verified drafts")
        self._drafted = count(spec + "draft_tokens", "drafted tokens")
        self._accepted = count(spec + "accepted_tokens", "accepted drafts")
        self._at = count(spec + "accepted_tokens_per_pos", "accepted drafts", "position")
        self._queue = watch("vllm:request_queue_time_seconds", "until the prompt is read")
        self._first = watch("vllm:time_to_first_token_seconds", "from arrival")
        self._whole = watch("vllm:e2e_request_latency_seconds", "from arrival to the end")
        self._between = watch(
            "vllm:request_time_per_output_token_seconds", "mean of an answer"
        )
        show("medusa_slots", "requests answered at a time", lambda: server.slots)
        show("vllm:num_requests_running", "slots with a request", lambda: server.busy)
        show("vllm:num_requests_waiting", "without a slot", lambda: server.waiting)
        if learner := server.learner:
            for name, doc in FACTS.items():
                show(
                    f"medusa_learning_{name}", doc, partial(learner.facts.__getitem__, name)
                )
            in_use = "medusa_learning_in_use", "1 if drafts use the adapter"
            show(*in_use, lambda: bool(server.model.learned))

    def ended(self, ending: Ending) -> None:
        result, seconds = ending.result, ending.waited_seconds
        first = seconds + result.prefill_seconds
        self._prompt.inc(result.prompt_tokens)
        self._reused.inc(ending.reused_tokens)
        self._written.inc(result.new_tokens)
        self._drafts.inc(len(ending.accepted_by_step))
        self._drafted.inc(ending.drafted)
        self._accepted.inc(ending.accepted_drafts)
        self._queue.observe(seconds)
        self._first.observe(first)
        self._whole.observe(first + result.decode_seconds)
        if result.new_tokens > 1:
            self._between.observe(result.decode_seconds / (result.new_tokens - 1))
        self._ended.labels("stop" if result.finish_reason == "stop" else "length").inc()
        for appended, steps in enumerate(result.acceptance_histogram, 1):
            self._steps.labels(str(appended)).inc(steps)
        for depth in filter(None, result.draft_depths):
            self._at.labels(str(abs(depth) - 1)).inc()
