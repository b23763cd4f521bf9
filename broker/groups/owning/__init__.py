"""The owners of queues in their groups, and how far they are.

lock      a lock as it is kept, and whose it is
locks     which client owns which queue
readers   which queues foreign members read, kept over a restart
offsets   committed offsets
progress  how far groups have come
watch     who reads which queue: reports queues with two readers or none
"""
