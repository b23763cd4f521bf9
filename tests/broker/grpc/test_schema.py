"""The descriptors that are checked in, and the pool that they live in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool
from rocketlet.broker.grpc import schema
from rocketlet.broker.grpc.server import METHODS

FOLDER = Path(schema.__file__).parent


def test_the_descriptors_are_those_of_the_proto_file(tmp_path: Path) -> None:
    """Written by `python -m grpc_tools.protoc` with these arguments, in broker/grpc."""
    made = tmp_path / "service.binpb"
    arguments = ["-I", str(FOLDER), "--include_imports", f"--descriptor_set_out={made}", "service.proto"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True)
    found, checked_in = (
        {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file}
        for path in (made, FOLDER / "service.binpb")
    )
    assert found["service.proto"] == checked_in["service.proto"]
    assert sorted(found) == sorted(checked_in)


def test_every_method_has_the_messages_of_the_service() -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString((FOLDER / "service.binpb").read_bytes()).file
    (service,) = files[-1].service
    for method in service.method:
        served = METHODS.get(method.name)
        if served is not None:
            assert served.request.DESCRIPTOR.full_name == method.input_type[1:]
            assert served.response.DESCRIPTOR.full_name == method.output_type[1:]
            assert (served.is_open, served.is_stream) == (method.client_streaming, method.server_streaming)
    assert {method.name for method in service.method} >= METHODS.keys()


def test_the_default_pool_is_left_to_others() -> None:
    """The official Python client registers messages of the same names there."""
    try:
        descriptor_pool.Default().FindMessageTypeByName(f"{schema.PACKAGE}.Message")
    except KeyError:
        pass
    else:
        raise AssertionError("the default pool has our messages")
    code = (
        "from google.protobuf import descriptor_pb2, descriptor_pool, message_factory\n"
        "from rocketlet.broker.grpc import schema\n"
        "pool = descriptor_pool.Default()\n"
        "file = descriptor_pb2.FileDescriptorProto(name='definition.proto', package=schema.PACKAGE)\n"
        "file.message_type.add(name='Message').field.add(name='other', number=1, type=9, label=1)\n"
        "pool.AddSerializedFile(file.SerializeToString())\n"
        "theirs = message_factory.GetMessageClass(pool.FindMessageTypeByName(schema.PACKAGE + '.Message'))\n"
        "assert theirs(other='x').SerializeToString() != schema.Message(body=b'x').SerializeToString()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
