"""Administration of a cluster, over the wire that Apache's brokers have, too.

admin_client  topics, groups, offsets, brokers, accounts
messages      messages found without a group, sent again, and marked as copies
diagnosis     the findings of `rocketlet doctor`
dead_letters  which dead letters are new, replayed or discarded
trace         message traces, and what became of a message in each group
"""
