"""From a record of a file to prompt ids, through the chat template."""

from medusa_jax.api import Model, Options, asking
from medusa_jax.errors import UserError
from medusa_jax.evaluate.questions import prompt_of
from medusa_jax.interop.chat import encode_prompt
from medusa_jax.whole_files import Json


def ending_turns(model: Model, options: Options, template: str) -> Options:
    """Options whose text ends where the chat template ends a turn, unless they say where."""
    return asking.ending_turns(model.tokenizer, model.eos_ids, options, template)


def asked(model: Model, record: Json, template: str = "") -> str | list[int]:
    """Return the prompt of a record; of a conversation, everything up to its last user turn; of a
    question with `turns`, the first.

    Raises:
      UserError: the template refuses the conversation, or it has no user turn.
    """
    if "messages" in record:
        messages = record["messages"]
    elif "turns" in record and (template or model.tokenizer.chat_template):
        messages = [{"role": "user", "content": record["turns"][0]}]
    elif "turns" in record:
        return str(record["turns"][0])
    else:
        return prompt_of(record)
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        raise UserError("a conversation without a user turn cannot be answered")
    return encode_prompt(model.tokenizer, messages[: users[-1] + 1], template)
