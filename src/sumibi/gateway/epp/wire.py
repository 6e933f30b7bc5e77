"""The messages of `ext_proc.proto`, as classes of the protobuf runtime.

They are loaded from the compiled description of that file rather than from generated Python: that is what a
runtime refuses which is of another generation than its generator. They live in a pool of their own, so that
Envoy's whole protocol may be loaded beside them under the same names.
"""

from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

PACKAGE: Final = "envoy.service.ext_proc.v3"
SERVICE: Final = f"{PACKAGE}.ExternalProcessor"
DESCRIPTION: Final = Path(__file__).with_name("ext_proc.binpb")


def _load() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    for file in descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTION.read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_pool = _load()


def message(name: str, package: str = PACKAGE) -> Any:
    """The class of a message."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{package}.{name}"))


ProcessingRequest = message("ProcessingRequest")
ProcessingResponse = message("ProcessingResponse")
HealthQuestion = message("HealthQuestion")
HealthAnswer = message("HealthAnswer")
