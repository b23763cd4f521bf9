"""The name server's state.

routes    the table: which brokers there are, and which topics each has
networks  which clients come from outside of them
"""
