"""Messages: topics, sends, delays, transactions, filters and held pulls. Nothing here depends on the broker.

topics        settings of topics
statistics    rates of topics and groups
sending       SEND: checks, topic, queue; retries and dead letters
dedup         the ids of messages, by which repeated sends get the first result
appender      the only path into the store
lite          lite topics: the index of their messages
delays        delay levels
timers        delivery times
recalls       recalls of messages with a delivery time
notes         records of delivered delayed messages in the log
transactions  half messages and their outcomes
filters       SQL92 filters
held_pulls    pulls that wait for a message
"""
