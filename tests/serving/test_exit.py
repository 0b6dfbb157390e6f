"""What a supervisor sees of a server whose device is gone."""

import json
import subprocess
import sys
import urllib.error
import urllib.request

import children
import pytest
from tiny import write_model

BROKEN = """
import sys
import threading
from medusa_jax.commands import serve
from medusa_jax.serving.batch import Batch

true = Batch.begin

def begin(*given):
    if threading.current_thread().name == "decoding":
        raise RuntimeError("the device is gone")
    return true(*given)

Batch.begin = begin
sys.exit(serve.main(sys.argv[1:]))
"""


@pytest.mark.wide
def test_a_process_whose_device_is_gone_exits(tmp_path):
    """With a status that is not 0, after calls that were all told."""
    write_model(tmp_path)
    flags = ["--model", str(tmp_path), "--port", "0", "--warm_up", "0", "--name", "tiny"]
    server = subprocess.Popen(
        [sys.executable, "-c", BROKEN, *flags],
        env=children.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr
        line = next(line for line in server.stderr if "is the page" in line)
        url = line.split("the page, ")[1].split()[0]
        body = json.dumps({"model": "tiny", "prompt": "in"}).encode()
        kind = {"content-type": "application/json"}
        for _ in range(3):
            call = urllib.request.Request(f"{url}/completions", body, kind)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(call, timeout=60)
            assert refused.value.code == 503
        assert server.wait(30) == 1
        assert "ended after repeated errors" in server.stderr.read()
    finally:
        server.kill()
        server.wait()
