"""The nets that --model can name, their initial weights, and the trial of a net."""
