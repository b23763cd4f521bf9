"""Moves between clusters, Rocketlet's or Apache's.

mirror  copies topics, groups and messages while clients keep using the source
move    moves producers and groups to the target, on top of a mirror
"""
