"""Shared cases and tools of the tests."""
