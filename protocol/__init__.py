"""The wire protocol of Apache RocketMQ 4.9: bytes to values and back. Pure: no sockets, no clock, no logging.

frame       one frame: length, serialize type, header, body; the reader that cuts a byte stream into frames
headers     the extension fields of a header, for each request code
header_code functions that read and write one kind of header
sent        the answer to a send
pulled      the head of an answer with messages
extents     where queues begin and end: a request of our own
queue       one queue of a topic
recall_handle  names a message that waits for its time
signature   proves who sent a request, as Apache's ACL does
schema      checks JSON bodies once, at the border
bodies      JSON bodies of clients
fastjson_text  the JSON that only fastjson writes
group_bodies  bodies of membership: locks, member lists, assignments, filters
admin_bodies  questions of administration
admin_answers  their answers
registration_body  what a broker registers at name servers
agreement   brokers of one group tell each other who is a member
allocation  how members share queues
trace       records of Apache's message trace
checksum    CRC-32 of a message
work        long work in slices
message     the message record, the same on disk and on the wire; ids
batch       the body of a batch, and the records that it becomes
properties  the text that holds keys, tags and user properties
compression how large bodies are compressed
counting    numbers with their nouns
subscription  tag expressions, and the hash that filters use
pop_headers, pop_bodies  messages that are shared: what clients and brokers say of them
popped      their records, as clients get them
group_config a group's settings
names       names of topics and groups: which are legal, which are derived from others
http2/      HTTP/2 as a server speaks it
grpc        gRPC over HTTP/2: messages, status, deadlines
codes       the numbers: requests, responses, languages, flags
config      every limit
"""
