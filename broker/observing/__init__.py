"""A broker's metrics for Prometheus.

metrics              what is measured in a broker
name_server_metrics  what is measured in a name server that runs alone
metrics_port         serves it, and health checks
"""
