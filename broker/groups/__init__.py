"""Consumer groups: members, leases, offsets, pulls. No module of this package imports the broker.

history    events of groups, how long rebalances took, refused heartbeats
members    members, their shares and disagreements, and the member list that each member was given
stages     the stages of a change of a group with foreign members: drain, synchronization of brokers
group      a consumer group and its queues: all state of a group is in one object
settings   settings of groups, their mode (pull or pop)
leases     each queue of a group has one owner (LOCK_BATCH_MQ)
offsets    committed offsets, progress, readers of queues
claims     which foreign member claims which queue
drains     notifications of members, and how foreign members finish with a queue before it moves
agreement  brokers agree on the end of a drain
guard      another client's pulls of a queue wait until its foreign reader has finished
pulling    PULL_MESSAGE and offset commits: the checks in Apache's order; above `pops`
"""
