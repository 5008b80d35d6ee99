"""Tangents through the network."""
