"""What each command does, as importable functions."""
