"""Schemas of custom resources: defaults, validation, rules; what an API server does with a new object.

A CustomResourceDefinition holds a *structural schema* (OpenAPI v3 with additions of Kubernetes'). In this
order 1. nulls go where a field may not be null, 2. defaults come, 3. the result is validated by JSON Schema,
every object with known properties closed, 4. rules in CEL are evaluated. `format` is not looked at.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jsonschema
import msgspec
import re2

from sumibi.cluster.rules import field_name, holds, only_on_update
from sumibi.core.errors import ConfigError

Schema = Mapping[str, Any]
_OPEN: Final = "x-kubernetes-preserve-unknown-fields"
_EMBEDDED: Final = "x-kubernetes-embedded-resource"
_RULES: Final = "x-kubernetes-validations"
_SAME_WORDS: Final = """
    type required enum default example title description pattern minLength maxLength minimum maximum
    multipleOf minItems maxItems uniqueItems minProperties maxProperties
"""
_SAME: Final = frozenset(_SAME_WORDS.split())
"""Keywords that mean the same in JSON Schema."""
_OTHER_WORDS: Final = """
    properties items additionalProperties not allOf anyOf oneOf nullable format externalDocs
    x-kubernetes-int-or-string x-kubernetes-map-type x-kubernetes-list-type x-kubernetes-list-map-keys
"""
_OTHER: Final = frozenset((*_OTHER_WORDS.split(), _OPEN, _EMBEDDED, _RULES))
"""Keywords that are seen to here, or that say nothing about whether an object is valid."""
_OBJECT_FIELDS: Final[Schema] = {
    "apiVersion": {"type": "string"},
    "kind": {"type": "string"},
    "metadata": {"type": "object"},
}


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with an object."""

    path: str
    """Of the field, as in `spec.rules[0].name`; empty: the object itself."""
    message: str

    def __str__(self) -> str:
        return f"{self.path or 'the object'}: {self.message}"


class Definitions:
    """The custom resources that are known."""

    def __init__(self, schemas: Mapping[tuple[str, str], Schema]) -> None:
        """`schemas`: (apiVersion, kind) -> structural schema."""
        self._schemas = dict(schemas)

    @classmethod
    def load(cls, directory: Path) -> "Definitions":
        """From the CustomResourceDefinitions in `directory`, one a file (`*.json`).

        Raises ConfigError naming the file that is none.
        """
        schemas: dict[tuple[str, str], Schema] = {}
        for file in sorted(directory.glob("*.json")):
            try:
                spec = msgspec.json.decode(file.read_bytes())["spec"]
                for version in spec["versions"]:
                    name = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                    schemas[name] = version["schema"]["openAPIV3Schema"]
            except (msgspec.MsgspecError, KeyError, TypeError) as cause:
                raise ConfigError(f"{file}: not a CustomResourceDefinition as JSON: {cause!r}") from cause
        return cls(schemas)

    def __contains__(self, name: tuple[str, str]) -> bool:
        return name in self._schemas

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._schemas)

    def schema(self, api_version: str, kind: str) -> Schema:
        """Raises KeyError."""
        return self._schemas[api_version, kind]

    def problems(self, thing: Mapping[str, Any]) -> list[Problem]:
        """What an API server would say of `thing` as a new object of a kind that is known here."""
        return problems(self._schemas[thing["apiVersion"], thing["kind"]], thing)


def problems(schema: Schema, thing: Mapping[str, Any]) -> list[Problem]:
    """What an API server would say of `thing` as a new object with this structural schema.

    A rule that cannot be evaluated is a problem.
    """
    whole = with_defaults(schema, without_nulls(schema, thing))
    errors = validator(schema).iter_errors(whole)
    found = [Problem(path_text(error.absolute_path), error.message) for error in errors]
    return found or list(broken_rules(schema, whole))  # rules count on the types


def without_nulls(schema: Schema, value: Any) -> Any:
    """`value` without fields that are null and may not be."""
    if isinstance(value, dict):
        kept = {}
        for name, inner in value.items():
            below = _below(schema, name)
            if inner is not None or below is None or below.get("nullable"):
                kept[name] = inner if below is None else without_nulls(below, inner)
        return kept
    if isinstance(value, list) and "items" in schema:
        return [without_nulls(schema["items"], inner) for inner in value]
    return value


def with_defaults(schema: Schema, value: Any) -> Any:
    """`value` with every default that the schema has for what is missing."""
    if isinstance(value, dict):
        missing = {
            name: below["default"]
            for name, below in schema.get("properties", {}).items()
            if "default" in below and name not in value
        }
        return {
            name: inner if (below := _below(schema, name)) is None else with_defaults(below, inner)
            for name, inner in {**value, **missing}.items()
        }
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(schema["items"], inner) for inner in value]
    return value


def validator(schema: Schema) -> Any:
    """A JSON Schema validator that says the same of an object with its defaults."""
    whole = json_schema(schema)
    whole["properties"] = {**whole.get("properties", {}), **_OBJECT_FIELDS}
    return _Validator(whole)


def json_schema(schema: Schema, *, closed: bool = True) -> dict[str, Any]:
    """A structural schema in JSON Schema's words. Raises ConfigError for a keyword that is not known here.

    `closed`: fields that are not among an object's properties are refused. Inside `allOf`, `anyOf`, `oneOf`
    and `not` they are not: what stands there speaks of some of the fields only.
    """
    unknown = schema.keys() - _SAME - _OTHER
    if unknown:
        raise ConfigError(f"unknown words in a schema: {', '.join(sorted(unknown))}")
    made: dict[str, Any] = {word: schema[word] for word in _SAME & schema.keys()}
    if schema.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    if schema.get("nullable") and "type" in made:
        made["type"] = [*([made["type"]] if isinstance(made["type"], str) else made["type"]), "null"]
    if "properties" in schema:
        made["properties"] = {
            name: json_schema(inner, closed=closed) for name, inner in schema["properties"].items()
        }
    if schema.get(_EMBEDDED):
        made["properties"] = {**made.get("properties", {}), **_OBJECT_FIELDS}
    if isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = json_schema(schema["additionalProperties"], closed=closed)
    elif "additionalProperties" in schema:
        made["additionalProperties"] = schema["additionalProperties"]
    elif closed and "properties" in schema and not schema.get(_OPEN) and not schema.get(_EMBEDDED):
        made["additionalProperties"] = False
    if "items" in schema:
        made["items"] = json_schema(schema["items"], closed=closed)
    if "not" in schema:
        made["not"] = json_schema(schema["not"], closed=False)
    for word in ("allOf", "anyOf", "oneOf"):
        if word in schema:
            made[word] = [json_schema(inner, closed=False) for inner in schema[word]]
    return made


def broken_rules(schema: Schema, value: Any, path: tuple[str | int, ...] = ()) -> Iterator[Problem]:
    """Every rule that does not hold somewhere in `value`, or has no answer."""
    for rule in schema.get(_RULES, ()):
        text = rule["rule"]
        if only_on_update(text):
            continue
        try:
            if not holds(text, value_of(schema, value)):
                yield Problem(path_text(path), rule.get("message") or f"failed rule: {text}")
        except ConfigError as cause:
            yield Problem(path_text(path), str(cause))
    if isinstance(value, dict):
        for name, inner in value.items():
            below = _below(schema, name)
            if below is not None:
                yield from broken_rules(below, inner, (*path, name))
    elif isinstance(value, list) and "items" in schema:
        for number, inner in enumerate(value):
            yield from broken_rules(schema["items"], inner, (*path, number))


def value_of(schema: Schema, value: Any) -> Any:
    """`value` as rules see it: properties under names that CEL can write, numbers of their declared type."""
    if isinstance(value, dict):
        known = schema.get("properties", {})
        return {
            field_name(name) if name in known else name: value_of(_below(schema, name) or {}, inner)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [value_of(schema.get("items", {}), inner) for inner in value]
    if schema.get("type") == "number" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _below(schema: Schema, name: str) -> Schema | None:
    """The schema of an object's field; None where there is none."""
    below = schema.get("properties", {}).get(name)
    if below is None and isinstance(schema.get("additionalProperties"), dict):
        below = schema["additionalProperties"]
    return below  # type: ignore[no-any-return]


def path_text(parts: Iterable[str | int]) -> str:
    """A path as people write it: `spec.rules[0].name`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")


def _pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """Patterns are of Go's kind, in which `$` is the end of the text and `(?i)` may stand anywhere."""
    if isinstance(value, str) and not _expression(pattern).search(value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


@functools.lru_cache(maxsize=1024)
def _expression(pattern: str) -> Any:
    return re2.compile(pattern)


_extend: Final[Any] = jsonschema.validators.extend  # it has no types
_Validator: Final = _extend(jsonschema.Draft202012Validator, {"pattern": _pattern})
