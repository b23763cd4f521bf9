"""Door 2: gRPC.

receives    receives and acknowledgements of a client, for tests of several subjects
"""
