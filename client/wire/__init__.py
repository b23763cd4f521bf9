"""Servers as a client reaches them.

cluster       name servers, the routes of topics, connections to brokers
connection    one socket, and the set of them
access        TLS, Apache's ACL, the encoding of headers
home          the process and the event loop in which a client lives
running_time  timeouts that do not count the time in which the process stood still
answers       reads what servers answer
side_by_side  many questions, some of them at once
pull_header   the header of a pull request
stored_since  the first message of a queue that was stored at a time or later
identity      the name that a client gives itself
"""
