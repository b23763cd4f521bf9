"""Installed as `pyspark_rocketlet`, because Spark searches for data sources in packages whose names begin with
`pyspark_`."""

from rocketlet.spark.format import RocketletDataSource as DefaultSource

__all__ = ["DefaultSource"]
