"""Serializes or deserializes one message with Confluent's own client. Reads a JSON object from stdin, writes one to stdout."""

import base64
import json
import sys

from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, duration_pb2, json_format, message_factory, timestamp_pb2

order = json.load(sys.stdin)
file = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(order["descriptor"]))
pool = descriptor_pool.Default()
pool.Add(file)
message_class = message_factory.GetMessageClass(pool.FindMessageTypeByName(order["message"]))
registry = SchemaRegistryClient({"url": order["url"]})
context = SerializationContext(order["topic"], MessageField.VALUE)

if "json" in order:
    message = json_format.ParseDict(order["json"], message_class())
    value = ProtobufSerializer(message_class, registry)(message, context)
    answer = {"value": value.hex(), "bytes": message.SerializeToString().hex()}
else:
    looks_up = registry if order["looks_up"] else None
    deserializer = ProtobufDeserializer(message_class, {"use.deprecated.format": False}, looks_up)
    message = deserializer(bytes.fromhex(order["value"]), context)
    answer = {"json": json_format.MessageToDict(message)}
json.dump(answer, sys.stdout)
