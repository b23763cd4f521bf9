"""Administration of a cluster, over the wire that Apache's brokers have, too.

admin_client    topics, groups, offsets, messages, brokers
described       a topic and a group as administration describes them
diagnosis       what is wrong with a cluster, in order of harm
group_findings  what is wrong with one group
message_search  messages by id, by key, by place
message_trace   Apache's message trace
track           what became of a message in each group
ownership       who owned which queue, and when
delayed         messages that wait for their time
replay          sends a stored message again
dead_letters    which dead letters are new, replayed or discarded
offset_change   offsets that are set from outside
mirror          copies topics and groups to another cluster
origins         where the original of a copy lies
move            moves producers and groups to another cluster, on top of it
settling        waits for a group to come to rest
"""
