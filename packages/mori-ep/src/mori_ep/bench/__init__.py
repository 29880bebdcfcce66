"""`mori-ep-bench`."""
