"""Messages on their way to an application's handler.

pulling        pull requests
process_queue  pulled messages of one queue that are not yet acknowledged
calling        the handler as something that can be awaited
handling       messages to the handler, and the handler's outcome
crew           the worker tasks that run a handler
decoding       handlers that get what a body says
filling        batches that wait for their size
retrying       which exceptions are tried again, how often, and when
returning      hands a message back to its broker
reasons        why a message was not handled
deliveries     messages for a consumer without a handler
assignment     the queues that a consumer owns now
listeners      functions that are told of queues that come and go
commits        when a consumer commits
standing       names queues that stand, and a blocked event loop
questions      what brokers ask a consumer for an administrator
"""
