"""The warning about an idle accelerator."""

import os

import jax

from medusa_jax.devices.machine import warn_if_accelerator_unused


def test_an_accelerator_that_jax_does_not_use_is_told(monkeypatch, capsys):
    monkeypatch.setattr(os.path, "exists", lambda other: other == "/dev/nvidia0")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    warn_if_accelerator_unused()
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("warning: ") and err.count("\n") == 1
    assert "jax[cuda12]" in err
