"""Messages that members of a group share (POP): each is in the hands of one member for a time, until that is done with it.

deliveries   a message in our hands: its receipt, and until when it is ours
handout      who waits for a message, and which messages wait
popping      receives: one under way for each topic and broker
settling     what we say of a message: done, again later, given up
renewing     prolongs what is still in our hands
working      messages to the handler
sources      which topics at which brokers
sharing      puts them together
"""
