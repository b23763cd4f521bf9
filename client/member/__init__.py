"""One client in one consumer group.

membership  puts heartbeats, rebalance and leases together
heartbeats  tells brokers that the member is here
rebalance   WHEN queues change hands
shares      WHAT share is this member's, as brokers tell it
leases      HOW a queue changes hands
locks       LOCK_BATCH_MQ and UNLOCK_BATCH_MQ
hand_overs  several queues that are handed over in one request
offsets     where a queue is read from, and how far the group has come
broadcast   every member reads every queue
"""
