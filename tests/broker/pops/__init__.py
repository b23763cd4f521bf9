"""Messages shared among clients, below both doors.

world       pops over a store, without sockets
"""
