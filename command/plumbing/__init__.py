"""The parts that all commands share.

administration  runs a command against a cluster
access          how a command connects: TLS and accounts
output          columns for people, JSON for programs
bar             a progress bar on a terminal
settings        options from the tables of settings of groups and topics
numbers         parsers of numbers and times
console         requests to a console
logs            configures logging
repeats         limits equal warnings and errors in the log
"""
