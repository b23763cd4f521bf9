"""The message store: one commit log, a consume queue per queue, and their recovery. Only the flusher knows asyncio.

store     opens the folder; append, expire, sync
log       the commit log's segments and records
index     consume queues; reads by offset, position, time and key
recovery  recovery after a crash, inspection, backup
files     state files, descriptors, the folder's lock
journals  changes since a state file was written, popped messages, granted leases
schedule  messages that wait for their delivery time
disk      every call to the operating system
"""
