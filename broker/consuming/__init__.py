"""Consuming, for all doors: which member may read a queue, from where, and what it may commit.

parts     the state that the others look at
checked   pulls that were checked, and stay so until something changes
pulling a pull's messages, or why it waits
commits   who may commit, and the offsets that are kept
outcomes  the results of pulls
versions  a foreign member's subscriptions, where its heartbeat was lost
"""
