"""Which member owns which queue of its group, and how far it is.

locks     which client owns which queue
offsets   committed offsets
progress  how far groups have come
watch     who reads which queue: reports queues with two readers or none
"""
