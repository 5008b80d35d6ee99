"""The exact covariance of a staged convolutional head."""
