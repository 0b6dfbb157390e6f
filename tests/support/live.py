"""Bytes of the arrays that are alive, and programs that are compiled."""

import contextlib
import math
import threading
from functools import wraps

import jax


def on_a_device(x):
    """Bytes of an array on each of its devices."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def shard_bytes(tree):
    """Bytes of a tree on each of its devices."""
    return sum(on_a_device(x) for x in jax.tree.leaves(tree))


def live_bytes():
    """Bytes on the fullest device, of all arrays that are not deleted."""
    held = dict.fromkeys(jax.devices(), 0)
    for x in jax.live_arrays():
        for device in x.sharding.device_set:
            held[device] += on_a_device(x)
    return max(held.values())


class Peak:
    """The most bytes that were live after calls of the watched functions, beyond those before."""

    def __init__(self):
        self.before, self.bytes = live_bytes(), 0

    def watching(self, fn):
        """The same function, looked at each time that it has returned."""

        @wraps(fn)
        def watched(*args, **kwargs):
            out = fn(*args, **kwargs)
            self.bytes = max(self.bytes, live_bytes() - self.before)
            return out

        return watched


@contextlib.contextmanager
def compilations():
    """A list that gets the name of the thread of each compilation in here."""
    found = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
