"""Who is there, whichever door they came in by.

clients  producers by group, and what the broker asks of clients
memory   what all of them together may hold
reports  logs what clients do wrong, within limits
"""
