"""The files that `--profile observe` of docker-compose.yml loads, in Debian's Prometheus (`apt-get install prometheus`)."""
