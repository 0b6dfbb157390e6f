"""The call of an entry point: errors of the user are one line, with exit status 2."""

import sys
from collections.abc import Callable

from medusa_jax.console import discard, inform, open_standard_streams
from medusa_jax.errors import one_line


def run_main(main: Callable[[], int]) -> int:
    """Run an entry point; errors of the user, files, packages or memory are one line and status 2."""
    open_standard_streams()
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()  # here, where a failure is still handled
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        discard(sys.stdout)
        return 0
    except Exception as error:
        line = one_line(error)
        if not line:
            raise
        if isinstance(error, OSError) and error.filename is None:
            discard(sys.stdout)
        inform(f"error: {line}")
        return 2
