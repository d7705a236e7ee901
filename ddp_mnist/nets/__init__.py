"""The nets that --model can name, with their initial weights, losses and optimizers."""
