"""Files and messages for other tools: ONNX, ROS, Kalman filters, trackers, tables, rerun.

The formats of the data sets are in ``boxcov.data``. See docs/guide/formats.md.
"""
