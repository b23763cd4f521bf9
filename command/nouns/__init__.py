"""`rocketlet NOUN VERB`: a module for each noun.

brokers, topics, groups, offsets, messages, acl
jobs          the replays of a console
group_report  prints the report of `rocketlet groups show`
version       prints the versions of this program and of brokers
"""
