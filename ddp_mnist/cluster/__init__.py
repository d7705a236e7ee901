"""The processes of a run: how they are started, find each other, and notice that one is lost.

The only folder that imports `socket`. It knows no data set and no run folder.
"""
