"""Messages that members of a group share (POP) instead of queues: the parts of SharedConsumer and LiteConsumer.

receiving  receives, and free slots for the messages that they return
settling   renewals, acknowledgements, retries, rejections
member     one member of a group: what it receives, has in flight, and settles
"""
