"""What Prometheus may ask for."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from medusa_jax.serving.request import Ending
from medusa_jax.serving.server import Server

# From a step of a small model to a long answer of a large one.
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class VllmNames:
    """What vLLM calls what is counted here with the same meaning, for dashboards that know its names."""

    def __init__(self, registry: CollectorRegistry, server: Server) -> None:
        def count(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", what, labels, registry=registry)

        def watch(name: str, what: str) -> Histogram:
            return Histogram(f"vllm:{name}", what, buckets=SECONDS, registry=registry)

        self.prompt = count("prompt_tokens", "tokens of prompts")
        self.generated = count("generation_tokens", "tokens written")
        self.success = count("request_success", "choices that ended", "finished_reason")
        self.drafts = count("spec_decode_num_drafts", "steps that verified drafts")
        self.drafted = count("spec_decode_num_draft_tokens", "drafted tokens")
        self.accepted = count("spec_decode_num_accepted_tokens", "accepted drafts")
        self.accepted_at = count(
            "spec_decode_num_accepted_tokens_per_pos", "accepted drafts", "position"
        )
        self.first = watch("time_to_first_token_seconds", "from arrival")
        self.queue = watch("request_queue_time_seconds", "until the prompt is read")
        self.whole = watch("e2e_request_latency_seconds", "from arrival to the end")
        self.between = watch("request_time_per_output_token_seconds", "mean of an answer")
        gauges = {
            "num_requests_running": ("requests that have a slot", lambda: server.busy),
            "num_requests_waiting": ("requests without one", lambda: server.waiting),
        }
        for name, (what, read) in gauges.items():
            gauge = Gauge(f"vllm:{name}", what, registry=registry)
            gauge.set_function(read)

    def ended(self, ending: Ending) -> None:
        """Count a choice that has ended."""
        result, waited = ending.result, ending.waited_seconds
        self.prompt.inc(result.prompt_tokens)
        self.generated.inc(result.new_tokens)
        stopped = result.finish_reason == "stop"
        self.success.labels("stop" if stopped else "length").inc()
        if ending.tree_nodes > 1:
            self.drafts.inc(result.steps)
            self.drafted.inc(ending.drafted)
            self.accepted.inc(ending.accepted_drafts)
            for depth in filter(None, result.draft_depths):
                self.accepted_at.labels(str(depth - 1)).inc()
        self.first.observe(waited + result.prefill_seconds)
        self.queue.observe(waited)
        self.whole.observe(waited + result.prefill_seconds + result.decode_seconds)
        if result.new_tokens > 1:
            self.between.observe(result.decode_seconds / (result.new_tokens - 1))


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self, server: Server) -> None:
        self.registry = CollectorRegistry()

        def count(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"medusa_{name}", what, labels, registry=self.registry)

        def watch(name: str, what: str) -> Histogram:
            return Histogram(
                f"medusa_{name}", what, buckets=SECONDS, registry=self.registry
            )

        self.calls = count("calls", "calls by endpoint and status", "endpoint", "status")
        self.answers = count("answers", "choices that ended, and why", "finish_reason")
        self.cancelled = count("cancelled", "choices whose client went away or timed out")
        self.prompt = count("prompt_tokens", "tokens of prompts")
        self.reused = count(
            "reused_tokens", "tokens of prompts that were not computed again"
        )
        self.generated = count("generated_tokens", "tokens written")
        self.steps = count("steps", "decode steps by tokens appended", "appended")
        self.waited = watch("queue_seconds", "from arrival until the prompt is read")
        self.first = watch("first_token_seconds", "from arrival to the first token")
        self.between = watch("between_tokens_seconds", "mean of an answer")
        self.vllm = VllmNames(self.registry, server)
        gauges = {
            "slots": ("requests that are answered at a time", lambda: server.slots),
            "busy_slots": ("slots that have a request", lambda: server.busy),
            "waiting": ("requests without a slot", lambda: server.waiting),
        }
        for name, (what, read) in gauges.items():
            gauge = Gauge(f"medusa_{name}", what, registry=self.registry)
            gauge.set_function(read)

    def ended(self, ending: Ending) -> None:
        """Count a choice that has ended."""
        result = ending.result
        self.vllm.ended(ending)
        self.answers.labels(result.finish_reason).inc()
        self.prompt.inc(result.prompt_tokens)
        self.reused.inc(ending.reused_tokens)
        self.generated.inc(result.new_tokens)
        for appended, steps in enumerate(result.acceptance_histogram, 1):
            self.steps.labels(str(appended)).inc(steps)
        self.waited.observe(ending.waited_seconds)
        self.first.observe(ending.waited_seconds + result.prefill_seconds)
        if result.new_tokens > 1:
            self.between.observe(result.decode_seconds / (result.new_tokens - 1))

    def page(self) -> bytes:
        """All of them in Prometheus' text form."""
        return generate_latest(self.registry)
