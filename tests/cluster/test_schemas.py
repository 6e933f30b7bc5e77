"""What an API server does with a new custom resource, on schemas of the test's own."""

import pytest

from sumibi.cluster.rules import holds, only_on_update
from sumibi.cluster.schemas import Definitions, Problem, json_schema, problems, with_defaults, without_nulls
from sumibi.core.errors import ConfigError

TEXT = {"type": "string"}


def of(**properties):
    return {"type": "object", "properties": properties}


def spec(**properties):
    return of(spec=of(**properties))


def messages(schema, thing) -> list[str]:
    return [problem.message for problem in problems(schema, thing)]


def test_a_misspelled_field_is_refused_and_named():
    (problem,) = problems(spec(replicas={"type": "integer"}), {"spec": {"replica": 2}})
    assert problem.path == "spec"
    assert "'replica' was unexpected" in problem.message


def test_every_object_has_kind_version_and_metadata():
    thing = {"apiVersion": "a/v1", "kind": "K", "metadata": {"name": "n", "labels": {"a": "b"}}, "spec": {}}
    assert problems(spec(), thing) == []


def test_maps_and_objects_without_known_properties_are_open():
    schema = spec(labels={"type": "object", "additionalProperties": TEXT}, any={"type": "object"})
    assert problems(schema, {"spec": {"labels": {"x": "y"}, "any": {"z": 1}}}) == []
    (problem,) = problems(schema, {"spec": {"labels": {"x": 1}}})
    assert problem.path == "spec.labels.x"


@pytest.mark.parametrize("word", ["x-kubernetes-preserve-unknown-fields", "x-kubernetes-embedded-resource"])
def test_what_says_that_it_is_open_is(word):
    inner = {**of(known=TEXT), word: True}
    assert problems(spec(template=inner), {"spec": {"template": {"known": "a", "kind": "b"}}}) == []


def test_closed_only_outside_of_combinations():
    either = {**of(a=TEXT, b=TEXT), "anyOf": [of(a={"minLength": 2}), of(b={"minLength": 2})]}
    assert problems(spec(x=either), {"spec": {"x": {"a": "aa", "b": "b"}}}) == []
    assert problems(spec(x=either), {"spec": {"x": {"a": "a", "b": "b"}}})


def test_defaults_come_before_validation_and_into_what_they_bring():
    inner = {**of(port={"type": "integer", "default": 80}), "required": ["port"], "default": {}}
    schema = spec(listeners={"type": "array", "items": of(at=inner)})
    assert with_defaults(schema, {"spec": {"listeners": [{}]}}) == {
        "spec": {"listeners": [{"at": {"port": 80}}]}
    }
    assert problems(schema, {"spec": {"listeners": [{"at": {}}]}}) == []


def test_a_default_of_something_missing_needs_what_holds_it():
    assert with_defaults(spec(a={"type": "string", "default": "b"}), {}) == {}


def test_nulls_go_unless_they_may_be():
    schema = spec(a={"type": "string", "default": "d"}, b={"type": "string", "nullable": True}, c=TEXT)
    thing = {"spec": {"a": None, "b": None, "c": None}}
    assert without_nulls(schema, thing) == {"spec": {"b": None}}
    assert problems(schema, thing) == []


def test_a_null_of_a_field_that_is_not_known_is_refused_all_the_same():
    assert problems(spec(a=TEXT), {"spec": {"z": None}})


def test_integers_or_texts():
    schema = spec(surge={"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, TEXT]})
    assert problems(schema, {"spec": {"surge": "25%"}}) == problems(schema, {"spec": {"surge": 1}}) == []
    assert problems(schema, {"spec": {"surge": 1.5}})


@pytest.mark.parametrize(
    ("pattern", "text", "good"),
    [
        ("^a$", "a", True),
        ("^a$", "a\n", False),  # in Go's expressions, unlike Python's, $ is the very end
        ("^x(?i)y$", "xY", True),  # which Python refuses to read
        ("^[A-Za-z\\x60]+$", "a`", True),
    ],
)
def test_patterns_are_read_as_go_does(pattern, text, good):
    assert (problems(spec(a={"type": "string", "pattern": pattern}), {"spec": {"a": text}}) == []) is good


def test_a_schema_with_a_word_that_is_not_known_is_not_read_halfway():
    with pytest.raises(ConfigError, match="exclusiveMinimum"):
        json_schema({"type": "integer", "exclusiveMinimum": True})


def rule(text, message=""):
    return {"x-kubernetes-validations": [{"rule": text, **({"message": message} if message else {})}]}


def test_a_broken_rule_is_told_with_its_place_and_message():
    schema = spec(
        ports={"type": "array", "items": {**of(n={"type": "integer"}), **rule("self.n > 0", "above 0")}}
    )
    assert problems(schema, {"spec": {"ports": [{"n": 1}, {"n": 0}]}}) == [
        Problem("spec.ports[1]", "above 0")
    ]


def test_rules_see_defaults():
    schema = spec(ref={**of(kind={"type": "string", "default": "Service"}), **rule("self.kind == 'Service'")})
    assert problems(schema, {"spec": {"ref": {}}}) == []


def test_reserved_and_odd_names_are_written_as_kubernetes_does():
    inner = {
        **of(**{"namespace": TEXT, "a-b.c": TEXT}),
        **rule("self.__namespace__ == self.a__dash__b__dot__c"),
    }
    assert problems(spec(x=inner), {"spec": {"x": {"namespace": "n", "a-b.c": "n"}}}) == []
    assert problems(spec(x=inner), {"spec": {"x": {"namespace": "n", "a-b.c": "m"}}})


def test_keys_of_maps_keep_their_names():
    labels = {"type": "object", "additionalProperties": TEXT, **rule("self.all(k, k.startsWith('a-b/'))")}
    assert problems(spec(labels=labels), {"spec": {"labels": {"a-b/c": "d"}}}) == []


def test_a_rule_without_an_answer_is_a_problem():
    (told,) = messages(spec(x={**of(a=TEXT), **rule("self.a == 'b'")}), {"spec": {"x": {}}})
    assert "no answer" in told
    (told,) = messages(spec(x={**of(a=TEXT), **rule("nobody.knows(self.a)")}), {"spec": {"x": {}}})
    assert "cannot be evaluated" in told


def test_rules_about_a_change_say_nothing_of_a_new_object():
    assert problems(spec(x={**TEXT, **rule("self == oldSelf")}), {"spec": {"x": "a"}}) == []
    assert only_on_update("has(oldSelf.x) || true")
    assert not only_on_update("self.boldSelfie")


def test_numbers_have_their_declared_type():
    assert problems(spec(x={"type": "number", **rule("self < 0.5")}), {"spec": {"x": 0}}) == []


@pytest.mark.parametrize(
    ("text", "value", "good"),
    [
        ("self.split('/')[0] == 'a'", "a/b", True),
        ("self.split('/').size() == 1", "ab", True),
        ("self.substring(2) == 'c'", "abc", True),
        ("isIP(self)", "10.0.0.1", True),
        ("isIP(self)", "::1", True),
        ("isIP(self)", "fe80::1%eth0", False),
        ("isIP(self)", "a.example", False),
    ],
)
def test_functions_that_kubernetes_adds(text, value, good):
    assert holds(text, value) is good


def test_a_file_that_is_no_definition_is_named(tmp_path):
    (tmp_path / "a.json").write_text('{"spec": {}}')
    with pytest.raises(ConfigError, match=r"a\.json"):
        Definitions.load(tmp_path)
