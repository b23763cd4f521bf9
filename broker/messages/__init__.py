"""The state around messages. Nothing here knows its broker.

topics        the topics' settings
sending sends: checks, topic, queue, and where a message waits
retries       messages that are tried again, or given up
properties    the limit of properties, and where a message that waits is meant to go
appender      the only way into the store
held_pulls    pulls that wait for a message
delays        delayed messages
timers        messages that are sent to a time
notes         which of both were delivered, in the log itself
recalls       how they are taken back before it
transactions  half messages
statistics    the counters behind rates
filters       SQL92 filters that clients have asked for
sql_filter    how they are read
sql_terms     what they compute
"""
