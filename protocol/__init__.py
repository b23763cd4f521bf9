"""The wire protocol of Apache RocketMQ 4.9: bytes to values and back. Pure: no sockets, no clock, no logging.

frame         one frame: length, serialize type, header, body; the reader that cuts a byte stream into frames
headers       the extension fields of a header, for each request code; signatures
bodies        JSON bodies of clients, and how their shapes are checked; registration at name servers
group_bodies  JSON bodies of membership: locks, member lists, assignments, pop requests
admin_bodies  JSON bodies of administration, and of Apache's message trace
message       the message record, the same on disk and on the wire; batches, compression
properties    the text that holds keys, tags and user properties
names         names of topics, groups and queues; subscriptions
allocation    how members divide the queues of a topic
fast          the compiled module `_fast`, or functions that decline everything in its place
checksum      CRC-32 of a message
http2         HTTP/2 as a server speaks it
hpack         HTTP/2's header compression
grpc          gRPC over HTTP/2: messages, status, deadlines
codes         the numbers: requests, responses, languages, flags
config        every limit
"""
