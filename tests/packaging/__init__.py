"""The parts that users install: the public names, the distributions, and how both behave outside of this repository."""
