"""Accept or reject a machine or a cluster before it is trained on."""
