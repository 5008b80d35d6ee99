"""Every table and figure of the paper, one run each: which runs, their files, and the tables made from those files."""
