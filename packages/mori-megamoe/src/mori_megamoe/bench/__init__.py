"""`mori-megamoe-bench`."""
