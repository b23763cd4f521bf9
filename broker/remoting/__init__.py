"""Door 1: RocketMQ's remoting protocol. The only room that knows its frames, answer codes and remarks.

connection  one client's socket
dispatch    the way of the frames of one socket read to their handlers and back
kept_pulls  a connection's pulls that were checked
events      how clients are told and asked
identification  whose request a frame is
rules       what each request needs
table       every request code with its handler and permission
answers     how an answer is encoded
requests/   the handlers: each decodes a request, calls the state, and encodes the answer
"""
