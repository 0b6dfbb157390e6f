"""The child process of `bounded.py`. It reads lines of JSON from stdin and answers each with one."""

import json
import runpy
import signal
import sys
from contextlib import suppress


def limit(seconds: float, most_bytes: int) -> None:
    """Limit memory, and CPU time until the next call; 0 means no limit.

    Without a handler the signal ends the process, even during a long operation.
    """
    with suppress(ImportError, OSError, ValueError):  # unsupported by this system
        import resource

        if most_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Answer requests until stdin ends."""
    paths, program, settings, seconds, most_bytes = json.loads(sys.argv[1])
    sys.path = paths
    # Signals to the process group are for the parent; this process ends when the parent does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    answer = runpy.run_path(program)["make_answer"](*settings)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            limit(seconds, most_bytes)
            result = answer(request)
        except MemoryError:
            result = {"limit": f"it takes more than {most_bytes >> 20} MiB"}
        limit(0, 0)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
