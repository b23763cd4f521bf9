"""Door 2: gRPC, as the official clients of RocketMQ 5 speak it. The only room that knows its messages and codes.

door        the way of the calls of one socket read to their handlers and back
table       every method with its handler and permission
connection  one client's socket: HTTP/2 in and out
calls       one call: what it asks, how it is answered
schema      the messages, in a pool of their own
codes       what an answer's status says
hall        what every handler has at hand
clients     who is there: sessions by client id
authentication  who asks, and whether they may
needs       the permissions that each request needs
names       names in requests, checked
routes      where a topic's queues are
telemetry   the life of a client: settings, heartbeats
sends       messages that come in
messages    messages as these clients write them, and as they are stored
recalls     timed messages that are taken back
receives    messages that go out
acknowledgements  what a client says of messages in its hands
transactions  outcomes of half messages
"""
