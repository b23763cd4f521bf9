"""Messages on their way to an application's handler.

queues      pull requests, process queues, flow control, commits
handling    decoding, worker tasks, handlers, retries
once        the layer of `once=`, which skips messages that were handled
running     handler calls that are running, with their ages and stacks
deliveries  messages for a consumer without a handler
"""
