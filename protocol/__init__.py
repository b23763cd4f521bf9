"""The wire of Apache RocketMQ 4.9, pure: bytes to values and back. No sockets, no clock, no logging.

frame       one frame: length, serialize type, header, body; the reader that cuts a byte stream into frames
headers     what travels in a header's extension fields, per request code
bodies      JSON bodies; fastjson_text reads what fastjson writes and JSON forbids
message     the message record, the same on disk and on the wire; batch bodies; ids
properties  the text that carries keys, tags and user properties
compression how bodies over 4 KiB travel
subscription  tag expressions and the hash they are filtered by
names       topics and groups: what is legal, what is derived
codes       the numbers
"""
