"""The error model: from everything known about a box to risk, error distribution and regions.

``model.py`` applies an error model to detections, ``calibrate.py`` fits one on labelled frames.
"""
