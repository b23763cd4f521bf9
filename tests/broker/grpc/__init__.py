"""Door 2: gRPC."""
