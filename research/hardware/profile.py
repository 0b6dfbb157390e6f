"""Kernels of a run by time, from JAX's profiler."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from medusa_jax.whole_files import Json

# Kernels that are listed.
LISTED = 25


def profiled(run: Callable[[], object], n_steps: int) -> Iterator[Json]:
    """For each accelerator: kernels of a step, the time in which one runs, and the longest of all.

    Nothing for a CPU, whose planes list Python's functions.
    """
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            run()
        [path] = Path(directory).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    for plane in data.planes:
        if "/device:GPU" in plane.name or "/device:TPU" in plane.name:
            # On a GPU other lines repeat the streams' events by module and operation.
            lines = [
                x for x in plane.lines if "GPU" not in plane.name or "Stream" in x.name
            ]
            events = [(e.name, e.start_ns, e.duration_ns) for x in lines for e in x.events]
            if events:
                yield figures(events, n_steps)


def figures(events: list[tuple[str, float, float]], n_steps: int) -> Json:
    """Figures of events (name, start, duration), in nanoseconds.

    Example: [("a", 0, 2e6), ("b", 1e6, 3e6)], 2: one event a step, busy for 2 ms of each.
    """
    total: dict[str, float] = {}
    for name, _, duration in events:
        total[name] = total.get(name, 0) + duration
    times = Counter(name for name, _, _ in events)
    busy, end = 0.0, 0.0
    for _, start, duration in sorted(events, key=lambda event: event[1]):
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return {
        "kernels": len(events) / n_steps,
        "busy_ms": busy / 1e6 / n_steps,
        "longest": [
            [name[:80], total[name] / 1e6 / n_steps, times[name] / n_steps]
            for name in sorted(total, key=lambda name: -total[name])[:LISTED]
        ],
    }
