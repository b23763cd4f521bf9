"""The clients that are there, whichever door they came in by.

session  a client, as the state knows it
events   events for clients, and questions
refusal  why a client does not get what it asks for
generation  rises when something has changed that checks look at
clients  producers by group, and what the broker asks of clients
memory   the memory that all of them together may take
shares   limits of which each address has a share
recent   recent refusals
callers  connections of clients of 5.x, and what they were answered
reports  logs clients' faults, within limits
"""
