"""Counters for Prometheus, under our names and under vLLM's where the meaning is the same."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from medusa_jax.serving.request import Ending
from medusa_jax.serving.server import Server

# From a step of a small model to a long answer of a large one.
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, server: Server) -> None:
        self.registry = CollectorRegistry()

        def count(what: str, names: str, *labels: str) -> list[Counter]:
            return [
                Counter(name, what, labels, registry=self.registry)
                for name in names.split()
            ]

        def watch(what: str, names: str) -> list[Histogram]:
            return [
                Histogram(name, what, buckets=SECONDS, registry=self.registry)
                for name in names.split()
            ]

        def show(what: str, names: str, read: Callable[[], float]) -> None:
            for name in names.split():
                Gauge(name, what, registry=self.registry).set_function(read)

        [self.calls] = count(
            "calls by endpoint and status", "medusa_calls", "endpoint", "status"
        )
        [self.cancelled] = count("choices that were not answered whole", "medusa_cancelled")
        [self._answers] = count("ended choices", "medusa_answers", "finish_reason")
        [self._success] = count("ended choices", "vllm:request_success", "finished_reason")
        [self._steps] = count("decode steps by tokens appended", "medusa_steps", "appended")
        self._prompt = count("tokens of prompts", "medusa_prompt_tokens vllm:prompt_tokens")
        self._reused = count("tokens of prompts not computed again", "medusa_reused_tokens")
        self._written = count(
            "tokens written", "medusa_generated_tokens vllm:generation_tokens"
        )
        spec = "vllm:spec_decode_num_"
        self._drafts = count("steps that verified drafts", spec + "drafts")
        self._drafted = count("drafted tokens", spec + "draft_tokens")
        self._accepted = count("accepted drafts", spec + "accepted_tokens")
        [self._accepted_at] = count(
            "accepted drafts", spec + "accepted_tokens_per_pos", "position"
        )
        self._queue = watch(
            "from arrival until the prompt is read",
            "medusa_queue_seconds vllm:request_queue_time_seconds",
        )
        self._first = watch(
            "from arrival to the first token",
            "medusa_first_token_seconds vllm:time_to_first_token_seconds",
        )
        self._whole = watch("from arrival to the end", "vllm:e2e_request_latency_seconds")
        self._between = watch(
            "mean of an answer",
            "medusa_between_tokens_seconds vllm:request_time_per_output_token_seconds",
        )
        running = "medusa_busy_slots vllm:num_requests_running"
        waiting = "medusa_waiting vllm:num_requests_waiting"
        show("requests answered at a time", "medusa_slots", lambda: server.slots)
        show("slots that have a request", running, lambda: server.busy)
        show("requests without a slot", waiting, lambda: server.waiting)

    def ended(self, ending: Ending) -> None:
        """Count a choice that has ended."""
        result, waited = ending.result, ending.waited_seconds
        first = waited + result.prefill_seconds
        for counters, value in (
            (self._prompt, result.prompt_tokens),
            (self._reused, ending.reused_tokens),
            (self._written, result.new_tokens),
            (self._drafts, result.steps * (ending.tree_nodes > 1)),
            (self._drafted, ending.drafted),
            (self._accepted, ending.accepted_drafts),
        ):
            for counter in counters:
                counter.inc(value)
        spans = [(self._queue, waited), (self._first, first)]
        spans.append((self._whole, first + result.decode_seconds))
        if result.new_tokens > 1:
            spans.append((self._between, result.decode_seconds / (result.new_tokens - 1)))
        for histograms, seconds in spans:
            for histogram in histograms:
                histogram.observe(seconds)
        self._answers.labels(result.finish_reason).inc()
        stopped = result.finish_reason == "stop"
        self._success.labels("stop" if stopped else "length").inc()
        for appended, steps in enumerate(result.acceptance_histogram, 1):
            self._steps.labels(str(appended)).inc(steps)
        for depth in filter(None, result.draft_depths):
            self._accepted_at.labels(str(abs(depth) - 1)).inc()
