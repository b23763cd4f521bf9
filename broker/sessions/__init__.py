"""Who is there, whichever door they came in by.

session  what state knows of a client
events   what clients are told and asked
refusal  why a client does not get what it asks for
clients  producers by group, and what the broker asks of clients
memory   what all of them together may hold
recent   what was refused lately
reports  logs what clients do wrong, within limits
"""
