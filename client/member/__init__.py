"""One client in one consumer group.

membership  heartbeats, rebalance and leases together; broadcasting
leases      how a queue changes hands: locks, releases
offsets     where a queue is read from, and how far the group has come
"""
