"""Shared by kfac and predict: recognising layer calls, unfolding, data types, distributed runs."""
