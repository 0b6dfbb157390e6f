"""What Prometheus may ask for."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from medusa_jax.serving.request import Ending
from medusa_jax.serving.server import Server

# From a step of a small model to a long answer of a large one.
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


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
