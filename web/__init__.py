"""HTTP, as the console and the control port serve it.

server  listens, and limits connections
config  every limit
"""
