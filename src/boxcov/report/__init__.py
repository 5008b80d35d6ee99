"""A study as one HTML page, and as PNG figures. Figures need matplotlib."""
