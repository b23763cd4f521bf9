"""The message store: one commit log, a consume queue per queue, and their recovery. Only `Flusher` uses asyncio.

store     opens the folder; append, expiry, sync
log       segments and records of the commit log
index     consume queues; reads by offset, position, time and key
recovery  recovery after a crash, inspection, backup
files     state files, file descriptors, and the lock of the folder
journals  changes since a state file was written; popped messages; granted leases
schedule  messages that wait for their delivery time
disk      calls to the operating system
"""
