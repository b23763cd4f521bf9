"""The broker as a client of name servers and of other brokers.

link          a connection to one of them
registration  tells name servers of the broker
peers         connections to other brokers
"""
