"""How good boxes and covariances are, from plain arrays: numpy only."""
