"""Clusters that are staged for `rocketlet doctor`: `WELL` ones, and `SICK` ones with what is wrong.

sick   twenty clusters, each with all that is wrong with it
stage  a broker, and what a cluster puts around it
well   twenty clusters of which nothing must be said
"""

from .sick import SICK
from .well import WELL

__all__ = ["SICK", "WELL"]
