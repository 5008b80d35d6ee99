"""Ways out of boxcov: graphs and files that other programs run and read."""
