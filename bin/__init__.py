"""The commands: each parses its arguments, calls into the packages that do the work, and prints."""
