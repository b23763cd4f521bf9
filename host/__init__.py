"""The machine, as brokers and clients both need it.

address  the address under which others reach this machine
files    files that users name: a limit on each, and no wait at a pipe
memory   freed memory, kept for the next use
version  Rocketlet's version
"""
