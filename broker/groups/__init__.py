"""The state of consumer groups. Nothing here knows its broker.

member         one client in one group: what it says of itself
members        who is a member, and what each subscribes to
disagreements  where members disagree, in words
settings       the settings of groups
offsets        committed offsets
progress       how far groups have come
locks          which client owns which queue
sticky         which queues are to be whose, where members use STICKY
watch          who reads which queue: reports queues with two readers or none
given          which members each foreign member was told of
drain          a change that not all foreign members know yet
draining       how foreign members finish with a queue before it moves
agreement      brokers agree on when a foreign member learns of a change
owners         whose each queue is to be, in groups with foreign members
notifications  tells members that their group changed
history        what happened, for administrators
rebalances     how long queues change hands, for metrics
"""
