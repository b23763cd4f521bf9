"""HTTP/2 (RFC 9113) as a server speaks it: bytes to events and back. Pure: no sockets, no clock.

frames      one frame: its kinds, flags, settings, error codes; how it is encoded
hpack       header blocks (RFC 7541): decoded with limits, encoded without a table
fields      which header fields a request may have
flow        the windows of a stream and of the connection
connection  one client's connection: streams, settings, limits against floods
"""
