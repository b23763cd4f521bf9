"""A broker's metrics for Prometheus.

metrics       the metrics
metrics_port  serves it, and health checks
"""
