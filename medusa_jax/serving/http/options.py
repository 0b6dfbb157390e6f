"""The options of an answer, from the fields of a request."""

import re
import secrets
from typing import Any

from medusa_jax.api import Model, Options
from medusa_jax.constraints import Constraint, constraint_of
from medusa_jax.serving.http.fields import BodyFields, HttpError, Values
from medusa_jax.text.literal_text import literal_text
from medusa_jax.text.tokenizer import Tokenizer
from medusa_jax.whole_files import Json

# Most stop strings.
MOST_STOPS = 16
# Letters of llama.cpp's samplers. The options of those that `samplers` leaves out have their defaults.
SAMPLERS = {"temperature": "t", "top_k": "k", "top_p": "p", "min_p": "m"}
# Its other samplers, and their letters.
OTHERS = {"dry": "d", "typ_p": "y", "top_n_sigma": "s", "xtc": "x", "penalties": "e"}
OTHERS |= {"infill": "i", "adaptive_p": "a"}
# Defaults of options, and bounds of those that are real numbers.
DEFAULTS = Options(temperature=1.0)
NUMBERS = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "epsilon": (0, 1),
    "delta": (0, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-3, 1e3),
}
# vLLM's names of constraints: as fields guided_..., and within `structured_outputs`.
GUIDED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
ANYTHING = (dict, list, str, bool)
NUMBER = re.compile(r"\s*[-+]?[0-9_.]+\s*")
Form = tuple[str, Json]  # the field of a constraint, and its form
# Other fields of `structured_outputs`, with their neutral values.
STRUCTURED: Values = dict.fromkeys(
    ("disable_additional_properties", "disable_any_whitespace", "disable_fallback"),
    (False,),
) | {"structural_tag": (), "whitespace_pattern": ()}


def limit_of(fields: BodyFields, default: int) -> int:
    """Return the most new tokens: 0 reads only the prompt, and -1 is llama.cpp's "no limit"."""
    names = ("n_predict", "max_completion_tokens", "max_tokens")  # llama.cpp's order
    limits = [fields.whole(name, None, -1) for name in names]
    limit = next((n for n in limits if n is not None), default)
    return 2**31 - 1 if limit < 0 else limit


def lists_sampler(fields: BodyFields, name: str, letter: str) -> bool:
    """Whether `samplers`, names or a text of letters, has this one; it need not be given."""
    listed = fields.take("samplers", (list, str), "a list of names", (name,))
    known = [*SAMPLERS, *SAMPLERS.values(), *OTHERS, *OTHERS.values()]
    if unknown := [one for one in listed if one not in known]:
        raise fields.refused("samplers", f"has an unknown name: {str(unknown[0])[:40]!r}")
    return name in listed or letter in listed


def options_of(fields: BodyFields, name: str, model: Model, limit: int) -> Options:
    """Read the options of both endpoints; `limit` is the maximum number of new tokens."""
    asked = fields.text("model") or name  # llama.vim sends ""
    if asked != name:
        problem = f"there is no model {asked!r} here: the model is {name!r}"
        raise HttpError(404, problem, "model", "model_not_found")
    options: Json = {
        name: fields.number(name, getattr(DEFAULTS, name), *bounds)
        for name, bounds in NUMBERS.items()
    }
    seed = fields.take("seed", (int,), "a whole number", None)
    options |= {
        "max_new_tokens": max(1, limit),
        "top_k": max(0, fields.whole("top_k", 0, -1)),  # vLLM: -1 keeps all
        "seed": secrets.randbits(32) if seed in (None, -1) else seed % 2**32,
        "stop": _stops(fields),
        "logit_bias": _biases(fields, model.tokenizer),
        "constraint": _constraint(fields),
    }
    for sampler, letter in SAMPLERS.items():
        if not lists_sampler(fields, sampler, letter):
            options[sampler] = getattr(DEFAULTS, sampler)
    if penalty := fields.number("repeat_penalty", None, *NUMBERS["repetition_penalty"]):
        options["repetition_penalty"] = penalty  # llama.cpp's name
    if fields.flag("ignore_eos"):
        options["eos_ids"] = ()
    return Options(**options)


def _stops(fields: BodyFields) -> tuple[str, ...]:
    stop = fields.take("stop", (str, list), "a string or a list of strings", [])
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > MOST_STOPS or any(not isinstance(s, str) or not s for s in stop):
        raise fields.refused("stop", f"should be up to {MOST_STOPS} strings, none empty")
    return tuple(stop)


def _biases(fields: BodyFields, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Read OpenAI's biases by token id, or llama.cpp's, whose tokens may also be text."""
    given = fields.take("logit_bias", (dict, list), "numbers by token id, or pairs", {})
    pairs: Any = [[*one] for one in given.items()] if isinstance(given, dict) else given
    weights: Any = {}
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise fields.refused("logit_bias", "should be pairs of a token and a number")
    for token, bias in pairs:
        is_text = isinstance(token, str) and (pairs is given or not NUMBER.fullmatch(token))
        ids = literal_text(tokenizer).encode(token, add_bos=False) if is_text else [token]
        weights |= {str(i): -100 if bias is False else bias for i in ids}  # False bars
    with fields.blamed("logit_bias"):
        biases = Options(logit_bias=weights).penalties.bias
    if any(not -100 <= bias <= 100 for _, bias in biases):
        raise fields.refused("logit_bias", "should be numbers from -100 to 100")
    return biases


def _constraint(fields: BodyFields) -> Constraint | None:
    """Read OpenAI's and vLLM's constraints.

    Raises:
      HttpError: a constraint that cannot be served, or two of them.
    """
    forms = [form for form in [_response_format(fields)] if form]
    for name, kind in GUIDED.items():
        value = fields.take(f"guided_{name}", ANYTHING, "a constraint", None)
        if value is not None:
            forms.append((f"guided_{name}", {kind: value}))
    structured = fields.inside("structured_outputs", STRUCTURED)
    for name, kind in {**GUIDED, "json_object": "json_object"}.items():
        value = structured.take(name, ANYTHING, "a constraint", None)
        if value is not None and value is not False:
            forms.append((f"structured_outputs.{name}", {kind: value}))
    if len(forms) > 1:
        names = " and ".join(repr(name) for name, _ in forms)
        raise HttpError(400, f"an answer has one constraint, not {names}", forms[1][0])
    for name, form in forms:
        with fields.blamed(name):
            return constraint_of(form)
    return None


def _response_format(fields: BodyFields) -> Form | None:
    """Read OpenAI's forms; also a `schema` next to the type, as llama.cpp and Together have it."""
    name = "response_format"
    schema_format = fields.inside(name)
    kind = schema_format.take("type", ANYTHING, "a type", "text")
    if kind not in ("text", "json_object", "json_schema"):
        problem = "should be of type text, json_object, or json_schema with a 'json_schema'"
        raise fields.refused(name, problem)
    if kind == "text":
        return None
    holder = schema_format
    if kind == "json_schema" and "schema" not in schema_format.body:
        holder = schema_format.inside("json_schema")
        holder.text("name")
        holder.text("description")
        holder.flag("strict")
    schema = holder.take("schema", ANYTHING, "a JSON schema", None)
    if kind == "json_object" and schema in (None, {}, True):
        return name, {"json_object": True}
    if schema is None:
        raise holder.refused("schema", "is missing")
    return name, {"json_schema": schema}
