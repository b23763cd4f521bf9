"""Groups with foreign members, which do not say when they are done with a queue: Apache's push consumers.

given      which members each foreign member was told of
repeats    messages that may be handled again, and why
owners     whose each queue is to be
allotment  which members claim more than that, and are bound by it
claims     who takes itself for the reader of a queue
drain      a change that not all foreign members know yet
moves      which queues a change moves
notices    when a member is told of a change, and which list of members it is given
draining   how foreign members finish with a queue before it moves
agreement  brokers agree on when a foreign member learns of a change
"""
