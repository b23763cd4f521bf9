"""One client in one consumer group.

membership  heartbeats, rebalance and leases together; broadcasting
leases      how the owner of a queue changes: locks, releases
offsets     the start offset of a queue, and the committed offsets of a group
"""
