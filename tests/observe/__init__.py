"""What `--profile observe` of docker-compose.yml loads, in a Prometheus of Debian's (`apt-get install prometheus`)."""
