"""The state of consumer groups.

members   who is a member, and what each subscribes to
settings  the settings of groups
offsets   committed offsets
locks     which client owns which queue
draining  how foreign members let go of a queue
watch     who reads which queue
history   what happened, for people to look at
"""
