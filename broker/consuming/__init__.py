"""Consuming, for all doors: which member may read a queue, from where, and what it may commit.

parts     the state that the others look at
pulling what a pull gets, or why it waits
commits   who may say how far a group is, and what is kept of it
versions  what a foreign member subscribes to, where its heartbeat was lost
"""
