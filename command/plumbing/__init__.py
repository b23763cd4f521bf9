"""The parts that all commands share.

administration  asks a cluster and prints the answer
access          how a command connects: TLS and accounts
output          columns for people, JSON for programs
bar             how far a copy is, on a terminal
numbers         numbers that options take, and their ranges
logs            how a command logs
repeats         lines that are written once a minute
"""
