"""Online: the covariance of every box, by five methods that return the same ``Detections``."""
