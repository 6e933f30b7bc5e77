"""Our own description of the protocol against messages made with Envoy's (make_messages.py)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import unknown_fields

from sumibi.gateway.epp import wire

LINES = [
    line.split() for line in Path(__file__).with_name("messages.txt").read_text(encoding="ascii").splitlines()
]


def unknown(message) -> int:
    """Fields that our description does not know, at any depth."""
    count = len(unknown_fields.UnknownFieldSet(message))
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            of_values = field.message_type.fields_by_name["value"].message_type
            inside = list(value.values()) if of_values is not None else []
        else:
            inside = value if field.is_repeated else [value]
        count += sum(map(unknown, inside))
    return count


@pytest.mark.parametrize(("kind", "name", "text"), LINES, ids=[" ".join(line[:2]) for line in LINES])
def test_envoy_s_messages_are_read_whole_and_written_as_they_were(kind, name, text):
    data = bytes.fromhex(text)
    message = getattr(wire, kind).FromString(data)
    assert message.WhichOneof("request" if kind == "ProcessingRequest" else "response") == name
    assert unknown(message) == 0
    assert message.SerializeToString(deterministic=True) == data


def test_every_alternative_of_both_messages_is_among_them():
    for kind, oneof in (("ProcessingRequest", "request"), ("ProcessingResponse", "response")):
        fields = getattr(wire, kind).DESCRIPTOR.oneofs_by_name[oneof].fields
        assert {field.name for field in fields} == {name for k, name, _ in LINES if k == kind}


def test_the_description_is_that_of_the_proto_file():
    """Without protoc: every message of the file, with its fields and numbers."""
    text = wire.DESCRIPTION.with_name("ext_proc.proto").read_text()
    for name, body in re.findall(r"^message (\w+) \{\n(.*?)^\}", text, re.M | re.S):
        fields = {(field, int(number)) for field, number in re.findall(r"(\w+) = (\d+);", body)}
        assert fields == {(f.name, f.number) for f in wire.message(name).DESCRIPTOR.fields}, name


def test_the_command_line_does_not_load_grpc():
    code = (
        "import sys, sumibi.cli; print([m for m in sys.modules if m.partition('.')[0] in ('grpc', 'google')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
