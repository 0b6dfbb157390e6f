"""Forms of training data: which fields of a record hold its conversation or its text."""

from medusa_jax.interop import chat

# Fields that hold a list of turns.
TURNS = ("conversations", "messages", "conversation")
# Fields of one question, of what it is about, and of its answer: Alpaca, Dolly, prompt and completion.
QUESTIONS = ("instruction", "prompt", "question", "query")
ABOUT = ("input", "context")
ANSWERS = ("output", "completion", "response", "answer")
SYSTEMS = ("system", "system_prompt")


def turns_of(record: object, answered: bool = True) -> tuple[str, list[object]]:
    """The form of a conversation and its turns, not parsed; ("", []) of a record that holds none.

    Example: {"instruction": "Add.", "input": "1, 2", "output": "3"} ->
    ("instruction, input, output", [{"role": "user", "content": "Add.\\n\\n1, 2"}, {"role": "assistant", ...}]).

    Args:
      answered: whether a question needs an answer.
    """
    record = {"messages": record} if isinstance(record, list) else record
    fields: dict[str, object] = record if isinstance(record, dict) else {}
    if name := chat.field_of(fields, TURNS):
        found = fields[name]
        if isinstance(found, dict) and all(isinstance(x, list) for x in found.values()):
            # A list of structs, as `datasets` keeps some: a list of each field.
            found = [dict(zip(found, row)) for row in zip(*found.values())]
        turns = list(found) if isinstance(found, list) else []
        first = next((turn for turn in turns if isinstance(turn, dict)), {})
        keys = [chat.field_of(first, names) for names in (chat.ROLES_IN, chat.TEXTS_IN)]
        form = f"{name} ({', '.join(filter(None, keys))})"
    else:
        names = [chat.field_of(fields, names) for names in (QUESTIONS, ABOUT, ANSWERS)]
        question, about, answer = (fields.get(name) for name in names)
        if not names[0] or (answered and not names[2]):
            return "", []
        if about and isinstance(question, str):
            question = f"{question}\n\n{about}"
        turns = _as_turns("user", question) + _as_turns("assistant", answer)
        form = ", ".join(filter(None, names))
    system = fields.get(chat.field_of(fields, SYSTEMS))
    if system and not any(
        chat.read_turn(turn)[0].get("role") == "system" for turn in turns[:1]
    ):
        turns = _as_turns("system", system) + turns
    return form, turns


def _as_turns(role: str, said: object) -> list[object]:
    """A list of turns as it is, a text as the one turn of `role`, none of None."""
    if isinstance(said, list):
        return said
    return [] if said is None else [{"role": role, "content": said}]
