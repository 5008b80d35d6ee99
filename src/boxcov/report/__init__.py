"""Pictures and tables. Needs the packages of ``pip install boxcov[cli]``."""
