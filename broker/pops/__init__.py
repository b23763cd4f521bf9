"""Messages shared instead of queues: POP. The state below both doors; it knows no socket, no frame and no Broker.

pops        the whole: receive, acknowledge, change, forward, and what clients and topics do meanwhile
values      what goes in and comes out
handles     the receipt handle of a delivery, as text
pools       the pools of all groups
pool        the queues of a topic that a group pops, and the receives that wait for them
waits       the receives that wait, of all groups
deliveries  what is popped and not finished, of one group and queue
states      the states of a delivery
order       which messages of a queue wait for an earlier one of their message group
batches     what receives in order were given, by attempt
deadlines   when deliveries that nobody acknowledged come again
hands       the clients for which the broker prolongs the time
division    topics that some members pull and others pop: which queues are whose
seats       clients that pop, as members of a group that others pull
mixed       members that share with nobody, in groups that pop: that is said in the log
letters     copies for the dead-letter topic
settling    what was acknowledged in a turn of the loop: one write, then the answers
book        what of this is on the disk
records     the same as bytes
"""
