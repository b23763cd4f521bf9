"""POP: messages shared instead of queues. The state below both protocol servers; it knows no socket, frame or Broker.

pops        the entry point: receive, acknowledge, change the invisible time, dead letters
pool        the queues of a topic that a group pops, and the receives that wait for them
deliveries  popped messages of one queue in one group: states, order, invisible times, receipt handles
division    topics that some members pull and others pop
journal     what a restarted broker continues from
"""
