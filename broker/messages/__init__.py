"""The state around messages: nothing here knows the broker that it belongs to.

topics        the topics' settings
appender      the one way of a message into the store
held_pulls    pulls that wait for a message
delays        delayed messages
transactions  half messages
statistics    counters behind rates
sql_filter    SQL92 filters
"""
