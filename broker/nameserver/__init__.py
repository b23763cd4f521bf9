"""The name server.

routes    its table
requests  its handlers
"""
