"""The Gaussian over the weights: factors, prior, file."""
