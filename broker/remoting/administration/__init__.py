"""Remoting requests of tools.

topics           settings and offsets of topics
group_settings   settings of groups
progress         progress of groups, resets
clients          connections, requests that members answer
history          members, owners and events of a group
broker_settings  the broker's settings
monitoring       values for Apache's tools
"""
