"""A second version of the service, whose messages have fields with different names and numbers."""

from types import SimpleNamespace

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from seqpar.servers.wire import attention_pb2
from seqpar.servers.wire.messages import Task
from seqpar.servers.wire.versions import VERSIONS, Version

RENUMBERED = {("ComputeRequest", "session"): 9, ("Step", "writes"): 12, ("Welcome", "session"): 8}


def _messages():
    """Return what a generated module of the package seqpar.attention.v2 would contain."""
    file = descriptor_pb2.FileDescriptorProto()
    attention_pb2.DESCRIPTOR.CopyToProto(file)
    before, file.name, file.package = file.package, "attention_v2.proto", "seqpar.attention.v2"
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(before, file.package)
            field.number = RENUMBERED.get((message.name, field.name), field.number)
            if (message.name, field.name) == ("Task", "q_rows"):
                field.name, field.json_name, field.number = "query_rows", "queryRows", 20
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(before, file.package)
        method.output_type = method.output_type.replace(before, file.package)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindFileByName(file.name)
    classes = {
        name: message_factory.GetMessageClass(descriptor)
        for name, descriptor in found.message_types_by_name.items()
    }
    enums = {name: EnumTypeWrapper(x) for name, x in found.enum_types_by_name.items()}
    return SimpleNamespace(DESCRIPTOR=found, **classes, **enums)


class SecondVersion(Version):
    """Reads and writes messages in which one field has a new name."""

    def __init__(self):
        super().__init__(_messages())
        self._first = VERSIONS[-1]

    def task(self, task):
        fields = self._first.task(task)
        found = {x.name: value for x, value in fields.ListFields() if x.name != "q_rows"}
        return self.messages.Task(**found, query_rows=task.q_rows)

    def read_task(self, message):
        found = {x.name: value for x, value in message.ListFields() if x.name != "query_rows"}
        first = self._first.messages.Task(**found, q_rows=message.query_rows)
        task = self._first.read_task(first)
        assert isinstance(task, Task)
        return task


def first():
    """Return the versions that a process of the library's earlier release speaks."""
    return VERSIONS[-1:]


def both():
    """Return the versions that a process of the library's later release speaks."""
    return [SecondVersion(), *VERSIONS[-1:]]


def second():
    """Return the versions that a process speaks that knows no earlier version."""
    return [SecondVersion()]
