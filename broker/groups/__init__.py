"""The state of consumer groups. Nothing here knows its broker.

member         one client in one group: what it says of itself
members        who is a member, and what each subscribes to
disagreements  where members disagree, in words
settings       the settings of groups
modes          whether members pull queues or pop messages
sticky         which queues are to be whose, where members use STICKY
notifications  tells members that their group changed
refusals       heartbeats that were refused
history        what happened, for administrators
rebalances     how long queues change hands, for metrics
owning/        who owns and reads which queue, and how far it is
foreign/       members that do not say when they are done with a queue
"""
