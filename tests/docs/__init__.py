"""The docs: the site builds without a broken link, and every Python snippet of every page runs against a real broker.

snippets    runs the snippets of a page
"""
