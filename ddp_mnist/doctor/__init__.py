"""Accept or reject a machine or a cluster; may import everything but verify, bench and cli."""
