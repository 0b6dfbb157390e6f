"""What entry points share: the compilation cache, the warning about an idle accelerator."""

import os

import jax
import pytest

from medusa_jax import console


@pytest.fixture
def devices(monkeypatch):
    """Pretend that these device files, and no others, exist; returns a setter."""

    def exist(*paths, backend="cpu", platforms=None):
        monkeypatch.setattr(os.path, "exists", lambda path: path in paths)
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        if platforms is None:
            monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        else:
            monkeypatch.setenv("JAX_PLATFORMS", platforms)

    return exist


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/dev/nvidia0", ("GPU", "pip install 'jax[cuda12]'")),
        ("/dev/accel0", ("TPU", "pip install 'jax[tpu]'")),
        ("/dev/vfio/0", ("TPU", "pip install 'jax[tpu]'")),
    ],
)
def test_an_accelerator_that_jax_does_not_use_is_told(devices, capsys, path, words):
    devices(path)
    console.warn_if_accelerator_unused()
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("warning: ") and err.count("\n") == 1
    assert all(word in err for word in words), err


@pytest.mark.parametrize(
    "case",
    [
        {"paths": ()},  # nothing there
        {"paths": ("/dev/nvidia0",), "backend": "gpu"},  # there and used
        {"paths": ("/dev/nvidia0",), "platforms": "cpu"},  # the user asked for the CPU
    ],
)
def test_no_warning_where_nothing_is_wrong(devices, capsys, case):
    devices(*case.pop("paths"), **case)
    console.warn_if_accelerator_unused()
    assert capsys.readouterr() == ("", "")


def test_slow_things_are_announced_and_quick_ones_are_not(capsys):
    import time

    with console.announced("compiling", after=0.01):
        time.sleep(0.3)
    with console.announced("something quick", after=30):
        pass
    assert capsys.readouterr().err == "compiling ...\n"
