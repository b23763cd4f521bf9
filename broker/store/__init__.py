"""The message store: one commit log, an index per queue, and how they are recovered. Knows nothing of asyncio.

files          the only module that touches the file system
commit_log     records staged, committed, read
consume_queue  one queue's index into the commit log
recovery       what happens after a crash
store          them together: append, read, search, expire
state          topics, groups, offsets: small values that are kept beside the log
"""
