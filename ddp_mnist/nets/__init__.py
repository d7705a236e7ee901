"""Nets by name, ours and others, with the losses and optimizers that train them."""
