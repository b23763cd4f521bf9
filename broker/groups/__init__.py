"""The state of consumer groups: nothing here knows the broker that it belongs to.

members        who is a member, and what each subscribes to
settings       the settings of groups
offsets        committed offsets
progress       how far groups are
locks          which client owns which queue
watch          who reads which queue: names two readers, and none
draining       how foreign members let go of a queue before the next one is told of it
notifications  tells members that their group changed
history        what happened, for people to look at
"""
