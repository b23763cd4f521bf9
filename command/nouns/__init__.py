"""`rocketlet NOUN VERB`: a noun a module.

brokers, topics, groups, offsets, messages, acl
group_report  prints what `rocketlet groups show` finds
version       of this program and of brokers
"""
