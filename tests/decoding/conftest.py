import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick_compile(quick_compile):
    """Tiny models: compiling is nearly all of the time."""
