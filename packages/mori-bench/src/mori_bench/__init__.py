"""mori-bench."""
