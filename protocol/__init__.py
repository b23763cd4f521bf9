"""The wire protocols of Apache RocketMQ, remoting and gRPC: conversion between bytes and values. Pure: no sockets, no
clock, no logging.

frame         frames: length, serialize type, header, body; the reader that splits a byte stream into frames
headers       the extension fields of the headers of requests and responses; signatures
bodies        JSON bodies of clients, and the checks of JSON; registration at name servers
group_bodies  JSON bodies of membership: locks, member lists, assignments, pop requests
admin_bodies  JSON bodies of administration, and Apache's message trace
message       the message record, which is equal on disk and on the wire; batches, compression
properties    the text with keys, tags and user properties
names         names of topics, groups and queues; subscriptions
allocation    allocation strategies: which members get which queues of a topic
fast          the compiled module `_fast`, or functions in its place that decline everything
checksum      CRC-32 of a message
http2         HTTP/2 for a server
hpack         header compression of HTTP/2
grpc          gRPC over HTTP/2: messages, status, deadlines
codes         codes of requests, responses and languages; flags
settings      the settings of groups and topics, in one table each
config        the limits
"""
