"""What a body says of the form of its answer: OpenAI's `response_format`, vLLM's names."""

from typing import Any

from medusa_jax.constraints import Constraint, constraint_of
from medusa_jax.errors import UserError
from medusa_jax.serving.http.fields import Fields
from medusa_jax.serving.http.refused import Refused

# What vLLM calls our kinds, alone and within `structured_outputs`.
GUIDED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
ANYTHING = (dict, list, str, bool)
# Other fields of `structured_outputs`, and what asks for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("disable_additional_properties", "disable_any_whitespace", "disable_fallback"),
    (False,),
) | {"structural_tag": (), "whitespace_pattern": ()}


def asked_constraint(fields: Fields, chat: bool) -> Constraint | None:
    """The constraint that a body asks for.

    Raises:
      Refused: none that can be, or more than one.
    """
    asked: list[tuple[str, dict[str, Any]]] = []
    if chat and (found := _response_format(fields)):
        asked.append(("response_format", found))
    for name, kind in GUIDED.items():
        field = f"guided_{name}"
        value = fields.take(field, ANYTHING, "a constraint", None)
        if value is not None:
            asked.append((field, {kind: value}))
    within = fields.inside("structured_outputs", NEUTRAL)
    for name, kind in {**GUIDED, "json_object": "json_object"}.items():
        value = within.take(name, ANYTHING, "a constraint", None)
        if value is not None and value is not False:
            asked.append(("structured_outputs", {kind: value}))
    if len(asked) > 1:
        names = " and ".join(repr(name) for name, _ in asked)
        raise Refused(400, f"an answer has one constraint, not {names}", asked[1][0])
    for name, given in asked:
        try:
            return constraint_of(given)
        except UserError as error:
            raise Refused(400, str(error), name) from error
    return None


def _response_format(fields: Fields) -> dict[str, Any] | None:
    """OpenAI's forms; also a `schema` next to the type, as llama.cpp and Together have it."""
    name = "response_format"
    given = fields.inside(name)
    kind = given.take("type", ANYTHING, "a type", "text")
    if kind not in ("text", "json_object", "json_schema"):
        problem = "should be of type text, json_object, or json_schema with a 'json_schema'"
        raise fields.refused(name, problem)
    if kind == "text":
        return None
    holder = given
    if kind == "json_schema" and "schema" not in given.body:
        holder = given.inside("json_schema")
        holder.text("name"), holder.text("description"), holder.flag("strict")
    schema = holder.take("schema", ANYTHING, "a JSON schema", None)
    if kind == "json_object" and schema in (None, {}, True):
        return {"json_object": True}
    if schema is None:
        raise fields.refused(name, "has no 'schema' in 'json_schema'")
    return {"json_schema": schema}
