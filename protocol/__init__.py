"""The wire protocol of Apache RocketMQ 4.9: bytes to values and back. Pure: no sockets, no clock, no logging.

frame       one frame: length, serialize type, header, body; the reader that cuts a byte stream into frames
headers     the extension fields of a header, for each request code
header_code functions that read and write one kind of header
sent        the answer to a send
extents     where queues begin and end: a request of our own
bodies      JSON bodies; fastjson_text reads what fastjson writes although JSON forbids it
message     the message record, the same on disk and on the wire; ids
batch       the body of a batch, and the records that it becomes
properties  the text that holds keys, tags and user properties
compression how large bodies are compressed
subscription  tag expressions, and the hash that filters use
group_config a group's settings
names       names of topics and groups: which are legal, which are derived from others
http2/      HTTP/2 as a server speaks it
grpc        gRPC over HTTP/2: messages, status, deadlines
codes       the numbers: requests, responses, languages, flags
config      every limit
"""
