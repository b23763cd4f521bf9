"""Repeatable measurements beside peers, started here and measured in the same run."""
