"""Online: the covariance of every box, by four methods that return the same ``Detections``."""
