"""The gRPC protocol server.

lite        sends to lite topics
receives    receives and acknowledgements of a client, for tests of several subjects
"""
