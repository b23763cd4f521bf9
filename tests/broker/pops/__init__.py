"""Messages shared among clients, below both protocol servers.

world       pops over a store, without sockets
"""
