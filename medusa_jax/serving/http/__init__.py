"""The HTTP port of one `Server`: OpenAI's endpoints, health, metrics and a page."""

from medusa_jax.serving.http.app import make_app
from medusa_jax.serving.http.connections import Limits, make_listener

__all__ = ["Limits", "make_app", "make_listener"]
