"""The state around messages.

topics        the topics' settings
held_pulls    pulls that wait for a message
delays        delayed messages
transactions  half messages
statistics    counters behind rates
sql_filter    SQL92 filters
"""
