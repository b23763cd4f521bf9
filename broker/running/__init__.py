"""How the process runs: timers and tasks, long work in pieces, and its share of the machine. Nothing here knows messages.

tasks           work at intervals, and work that waits for something
engine          makes things happen later: tasks, turns and the clock
turns           long work, done in pieces, so that nobody waits for it
jobs            work that also waits for the device
device          the thread that waits for it
garbage         keeps the collector from looking at everything while a server runs
machine         how much memory there is, and how much the process takes
open_files      how many files the process may open, and how they are shared out
settings_files  certificates and accounts, which an operator changes
histogram       how long something took
"""
