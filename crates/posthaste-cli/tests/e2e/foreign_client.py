"""Reads one record of a topic and writes another with Confluent's own client. Reads a JSON object from stdin, writes one to stdout."""

import base64
import json
import sys

from confluent_kafka import Consumer, Producer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, duration_pb2, json_format, message_factory, timestamp_pb2

order = json.load(sys.stdin)
topic, brokers = order["topic"], {"bootstrap.servers": order["broker"]}
pool = descriptor_pool.Default()
pool.Add(descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(order["descriptor"])))
event_class = message_factory.GetMessageClass(pool.FindMessageTypeByName("posthaste.v1.EventHubEvent"))
registry = SchemaRegistryClient({"url": order["registry"]})
context = SerializationContext(topic, MessageField.VALUE)

consumer = Consumer(brokers | {"group.id": "foreign." + topic, "auto.offset.reset": "earliest"})
consumer.subscribe([topic])
record = consumer.poll(30)
if record is None or record.error():
    sys.exit("no record came: %s" % (record and record.error()))
deserializer = ProtobufDeserializer(
    event_class, {"use.deprecated.format": False}, registry if order["looks_up"] else None
)
event = deserializer(record.value(), context)
consumer.close()

own = json_format.ParseDict(order["event"], event_class())
value = ProtobufSerializer(event_class, registry)(own, context)
producer = Producer(brokers)
producer.produce(topic, key=own.event_id, value=value)
if producer.flush(30) > 0:
    sys.exit("the record was not accepted")

json.dump({"key": record.key().decode(), "event": json_format.MessageToDict(event)}, sys.stdout)
