"""A broker's metrics for Prometheus.

metrics              a broker's metrics
name_server_metrics  the metrics of a name server that runs alone
metrics_port         serves it, and health checks
"""
