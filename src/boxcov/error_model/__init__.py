"""From covariances and scores to the errors of boxes."""
