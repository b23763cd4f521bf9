"""Campaigns: attacks that run short in CI and for hours by hand. `python -m campaigns --help`."""
