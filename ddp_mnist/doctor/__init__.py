"""Accept or reject a machine or a cluster; may import everything but bench and the command line."""
