"""Tests by the rooms of the product; `support` has what several of them use.

side_by_side   which tests run in one worker
"""
