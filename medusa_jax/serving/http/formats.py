"""What a body says of the form of its answer: OpenAI's `response_format`, vLLM's names."""

from typing import Any

from medusa_jax.constraints import Constraint, constraint_of
from medusa_jax.errors import UserError
from medusa_jax.serving.http.fields import Fields
from medusa_jax.serving.http.refused import Refused

# What vLLM calls our kinds, alone and within `structured_outputs`.
GUIDED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def asked_constraint(fields: Fields, chat: bool) -> Constraint | None:
    """The constraint that a body asks for.

    Raises:
      Refused: none that can be, or more than one.
    """
    asked: list[tuple[str, dict[str, Any]]] = []
    if chat and (found := _response_format(fields)):
        asked.append(("response_format", found))
    anything = (dict, list, str, bool)
    for name, kind in GUIDED.items():
        field = f"guided_{name}"
        value = fields.take(field, anything, "a constraint", None)
        if value is not None:
            asked.append((field, {kind: value}))
    within = Fields(fields.take("structured_outputs", (dict,), "an object", {}))
    for name, kind in {**GUIDED, "json_object": "json_object"}.items():
        value = within.take(name, anything, "a constraint", None)
        if value is not None and value is not False:
            asked.append(("structured_outputs", {kind: value}))
    within.finish()
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
    name = "response_format"
    given = fields.take(name, (dict,), "an object with a 'type'", {})
    kind = given.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    described = given.get("json_schema")
    if kind != "json_schema" or not isinstance(described, dict):
        problem = "of type text, json_object, or json_schema with a 'json_schema'"
        raise Refused(400, f"{name!r} should be {problem}", name)
    if "schema" not in described:
        raise Refused(400, f"{name!r}: 'json_schema' has no 'schema'", name)
    return {"json_schema": described["schema"]}
