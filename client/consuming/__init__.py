"""Messages on their way to an application's handler.

queues      pull requests, process queues, flow control, commits
handling    decoding, worker tasks, handlers, retries
deliveries  messages for a consumer without a handler
"""
