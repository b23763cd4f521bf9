"""What Prometheus reads of a broker.

metrics       what is measured
metrics_port  serves it, and health checks
"""
