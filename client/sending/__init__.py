"""A message on its way to a broker.

sender        chooses where messages go, and what is tried again
accumulator   collects what one turn of the event loop sends to one queue
layers        what a producer's middleware sees
outgoing      what a message is on the wire, and what may not be sent
times         when a message is to be delivered
unique_keys   the id of a message, which its sender makes
sent          where messages were stored
requests      request and reply
options       what producers and sends are given
transactions  half messages and their outcome
"""
