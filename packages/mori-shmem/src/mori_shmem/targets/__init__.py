"""One module per target. Each offers the same few functions; nothing of a target is imported before it is
chosen."""
