"""The form in which a chat template has the model write tool calls."""

from dataclasses import dataclass

from medusa_jax.errors import UserError
from medusa_jax.text.chat import template_source
from medusa_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class CallForm:
    """How a model writes a call: begin, {"name": ..., <arguments>: {...}}, end.

    Attributes:
      begin, end: the text around a call.
      arguments: the key of the arguments.
      between: the text between two calls; None: at most one call.
    """

    begin: str
    end: str
    arguments: str
    between: str | None


# By a mark in the template; the first that occurs counts.
FORMS = {
    "<tool_call>": CallForm("<tool_call>\n", "\n</tool_call>", "arguments", "\n"),
    '"parameters"': CallForm("", "", "parameters", None),
}


def call_form(tokenizer: Tokenizer, template_name: str = "") -> CallForm:
    """The form of calls that the template asks the model for.

    Raises:
      UserError: it knows no tools, or calls of another form.
    """
    source = template_source(tokenizer, template_name, tools=True)
    if "tools" not in source:
        raise UserError("the model's chat template knows no tools")
    for mark, form in FORMS.items():
        if mark in source:
            return form
    raise UserError(
        "the model's chat template writes tool calls in a form that is not known here (known are "
        "those of Hermes and Qwen, and of Llama 3)"
    )
