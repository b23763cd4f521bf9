"""Connections to name servers and brokers.

connection  one socket: requests, responses, credentials, TLS
cluster     routes of topics, connections to brokers, start and stop
late_queues the start offsets of queues that a member did not see when it joined
"""
