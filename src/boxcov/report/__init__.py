"""What is filed: a study as one HTML page, and as figures for papers. Figures need the packages of ``pip install boxcov[cli]``."""
