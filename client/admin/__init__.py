"""Administration of a cluster, mostly with requests that Apache's brokers support, too.

admin_client  topics, groups, offsets, brokers, accounts
messages      find messages without a group, resend them, and mark copies
diagnosis     the findings of `rocketlet doctor`, and the observations that they need
findings      the findings about one group, from two observations
dead_letters  which dead letters are new, replayed or discarded
trace         message traces, and the state of a message in each group
"""
