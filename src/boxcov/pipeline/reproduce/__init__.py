"""``boxcov reproduce``: the runs behind every table and figure of the paper, and the tables."""
