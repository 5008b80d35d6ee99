"""What the command line does, one file a verb, as plain functions that a script can call."""
