"""What child processes of the tests are started with."""

import os
import sys


def environment(xla_flags: str = "") -> dict[str, str]:
    """This process's, with the settings of `conftest.py` and all that can be imported here.

    Args:
      xla_flags: go behind those that are set.
    """
    return os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def devices(n: int) -> str:
    """XLA's flags for n simulated CPU devices, which may wait long for each other on a busy machine.

    As it is, XLA ends the process where a thread comes 40 seconds late.
    """
    late = "--xla_cpu_collective_call_terminate_timeout_seconds=900"
    later = "--xla_cpu_collective_timeout_seconds=900"
    return f"--xla_force_host_platform_device_count={n} {late} {later}"
