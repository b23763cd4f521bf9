"""The pages: one module for each section of the console.

groups      groups, and one of them closely
paging      a part of a long list
"""
