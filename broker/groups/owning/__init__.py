"""The owners of queues in their groups, and how far they are.

locks     which client owns which queue
offsets   committed offsets
progress  how far groups have come
watch     who reads which queue: reports queues with two readers or none
"""
