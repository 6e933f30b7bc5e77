"""Any object of a manifest checked as an API server would: Kubernetes' own kinds, and custom ones we know."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import kubernetes_validate

from sumibi.cluster.schemas import Definitions, Problem, path_text

KUBERNETES: Final = "1.37"
"""The version by whose schemas Kubernetes' own kinds are checked."""


def object_problems(thing: Any, definitions: Definitions) -> list[Problem]:
    """What is wrong with `thing`; a kind that is not known is a problem."""
    if not isinstance(thing, Mapping):
        return [Problem("", f"want a mapping, got {type(thing).__name__}")]
    for field in ("apiVersion", "kind"):
        if not isinstance(thing.get(field), str):
            return [Problem(field, "want a text")]
    if (thing["apiVersion"], thing["kind"]) in definitions:
        return definitions.problems(thing)
    try:
        kubernetes_validate.validate(dict(thing), KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [Problem(path_text(error.absolute_path), error.message)]
    except kubernetes_validate.SchemaNotFoundError:
        return [Problem("kind", f"{thing['apiVersion']} {thing['kind']} is not known")]
    return []


def name_of(thing: Mapping[str, Any]) -> str:
    """`Kind/name`, for messages."""
    return f"{thing.get('kind')}/{thing.get('metadata', {}).get('name')}"


def all_problems(things: Iterable[Any], definitions: Definitions) -> list[str]:
    """Every problem of every object, with the object's name before it."""
    return [
        f"{name_of(thing) if isinstance(thing, Mapping) else thing!r}: {problem}"
        for thing in things
        for problem in object_problems(thing, definitions)
    ]
