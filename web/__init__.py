"""The HTTP server of the console and the control port.

server  serves an application and limits connections
config  all limits
"""
