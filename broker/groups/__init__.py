"""Consumer groups: members, leases, offsets, pulls. No module of this package imports the broker.

members    members, their shares and disagreements, the member list that each member was given, events of groups
stages     the stages of a change of a group with foreign members: drain, synchronization of brokers
owners     the owner of a queue: one value, and the table of its transitions
group      a consumer group and its queues: all state of a group is in one object
reading    who may read a queue now, for pulls, locks and commits
rates      how many messages a broker hands out to a group in a second
settings   settings of groups, their mode (pull or pop)
leases     changes the owners of queues: leases and locks (LOCK_BATCH_MQ), foreign readers, their journal
offsets    committed offsets, queues without a reader, and pulls that wait for a queue's foreign reader
drains     which foreign member claims which queue, how it finishes with a queue that moves, notifications of members
agreement  brokers agree on the end of a drain
pulling    PULL_MESSAGE and offset commits: the checks in Apache's order; above `pops`
"""
