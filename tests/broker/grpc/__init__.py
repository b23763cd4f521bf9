"""The gRPC protocol server.

receives    receives and acknowledgements of a client, for tests of several subjects
"""
