"""Offline: the Kronecker-factored Fisher of the training loss, and the Laplace posterior made of it."""
