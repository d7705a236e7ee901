"""The data set, decoded once, cached, and read in global batches.

May import errors, deadline and seeding, and nothing else of this package.
"""
