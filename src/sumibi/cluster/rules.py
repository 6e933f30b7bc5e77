"""Validation rules of custom resources (`x-kubernetes-validations`), written in CEL.

Every rule is evaluated or an error: one that is skipped would let pass what an API server refuses. Kubernetes
has functions that the CEL library lacks; those which our definitions use are here.

Not as in an API server: lists of the types `set` and `map` are compared in order.
"""

import functools
import ipaddress
import re
from typing import Any, Final

from cel_expr_python import cel

from sumibi.core.errors import ConfigError

_T = cel.Type
_RESERVED: Final = (
    " true false null in as break const continue else for function if import let loop package namespace"
    " return var void while "
)
"""Words that are no identifiers in CEL; a field named so is written `__word__`."""
_ESCAPES: Final = (("__", "__underscores__"), (".", "__dot__"), ("-", "__dash__"), ("/", "__slash__"))
_TRANSITION: Final = re.compile(r"\boldSelf\b")


def compiled(rule: str) -> Any:
    """The rule, ready to be evaluated. Raises ConfigError for one that the library cannot compile."""
    try:
        return _compile(rule)
    except Exception as cause:  # the library raises several kinds
        raise ConfigError(f"this validation rule cannot be evaluated: {rule!r}: {cause}") from cause


def holds(rule: str, value: Any) -> bool:
    """True if the rule holds for `value` (from `value_of`).

    Raises ConfigError where it has no answer, such as for a field that is not there.
    """
    answer = compiled(rule).eval(data={"self": value})
    if answer.type() != _T.BOOL:
        raise ConfigError(f"no answer from the rule {rule!r}: {answer.plain_value()}")
    return bool(answer.plain_value())


def only_on_update(rule: str) -> bool:
    """True for a rule about a change: of a new object nothing can be said."""
    return _TRANSITION.search(rule) is not None


def field_name(name: str) -> str:
    """A property's name as rules write it."""
    if f" {name} " in _RESERVED:
        return f"__{name}__"
    for found, written in _ESCAPES:
        name = name.replace(found, written)
    return name


@functools.lru_cache(maxsize=4096)
def _compile(rule: str) -> Any:
    return _environment().compile(rule)


@functools.cache
def _environment() -> Any:
    """Both words of a rule, and what Kubernetes adds to the language."""

    def function(name: str, result: Any, parameters: list[Any], run: Any, *, member: bool = True) -> Any:
        overload = cel.Overload(
            id=f"{name}_{len(parameters)}",
            return_type=result,
            parameters=parameters,
            is_member=member,
            impl=run,
        )
        return cel.FunctionDecl(name, [overload])

    functions = [
        function("split", _T.List(_T.STRING), [_T.STRING, _T.STRING], lambda text, mark: text.split(mark)),
        function("substring", _T.STRING, [_T.STRING, _T.INT], lambda text, first: text[first:]),
        function("isIP", _T.BOOL, [_T.STRING], _is_ip, member=False),
    ]
    return cel.NewEnv(variables={"self": _T.DYN, "oldSelf": _T.DYN}, functions=functions)


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text  # no zones in Kubernetes
