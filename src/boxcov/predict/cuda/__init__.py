"""What runs on a GPU alone."""
