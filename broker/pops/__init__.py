"""POP: messages shared instead of queues. The state below both protocol servers, without sockets, frames and the broker.

pops        the entry point: receive, acknowledge, change the invisible time
pool        a topic that a group pops: its queues, its clients, and the receives that wait
pools       the pools of all groups
progress    how far groups have come
deliveries  the deliveries of a queue: states and order, from the pop to the acknowledgement
requests    requests and results, for both protocol servers, and receipt handles
lite        lite topics: offsets, deliveries, subscribed lite topics of clients
lite_subscriptions  requests to subscribe to lite topics, and the expiration of lite topics
division    topics that some members pull and others pop
journal     the file from which a restarted broker continues, and when acknowledgements are written to it
deadlines   when messages that nobody acknowledged are redelivered
dead_letters  copies of messages in the dead-letter topic and the retry topic of a group
"""
