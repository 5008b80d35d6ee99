"""Offline: frames to Kronecker factors of the Fisher, and to the posterior made of them."""
