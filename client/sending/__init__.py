"""The path of a message to a broker.

sender       delivery times, the choice of a queue, retries
accumulator  batches of what one event-loop iteration sends to one queue
requests     request-reply and transactions
options      the options of producers and sends, each declared once
"""
