"""Boxes and their covariances for other programs, one file a format; those of data sets are in ``boxcov.data``. See docs/guide/formats.md."""
