"""The name server, and a broker's way to it.

routes    the table: which brokers there are, and which topics each has
networks  which clients come from outside of them
requests  the handlers
link      what a broker has of its name servers
"""
