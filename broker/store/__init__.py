"""The message store: one commit log, an index per queue, and how they are recovered. Only the flusher knows asyncio.

store          opens the folder; append and expire
reading        messages out of the log: by queue and offset, by position, by time
searching      by a text in them
commit_log     its records: whole ones, and those behind damage
written        what this process wrote, by sums: reads are checked by them
marks          where records begin, as no client can say it
recovery       what happens after a crash
copying        a data folder to another place, while it is written to
inspection     what of a folder is whole, for `rocketlet fsck`
consume_queue  one queue's index into the commit log
retention      the time by which segments expire
segments       a row of append-only files
files          what they share: errors, descriptors, state files, the folder's lock
journal        what has changed since a state file was written, a line each
frames         what was popped and acknowledged since a file of that was written
schedule       which messages wait for their time, in its order
runs           its files
ledger         which leases were granted
room           whether the device takes what is written
disk           every call to the operating system
flusher        `--flush sync`: answers wait until their messages are on the device
"""
