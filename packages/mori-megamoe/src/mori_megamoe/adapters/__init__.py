"""Into layers of others. Each module is imported by itself, and imports the other library only where it is
used."""
