"""Versions of the systems beside which we measure: the newest that their registries had when the figures were taken.

README.md of this folder names the same, which a test checks."""

from typing import Final

APACHE: Final = "4.9.7"  # the newest 4.9 whose broker and name server are on Maven Central
APACHE_FIVE: Final = "5.5.0"
KAFKA: Final = "4.4.0"
KAFKA_SPARK: Final = "4.2.0"  # Kafka's connector, which needs the PySpark of its own version
NATS: Final = "2.15.3"
