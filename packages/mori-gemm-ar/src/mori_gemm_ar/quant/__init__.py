"""8-bit formats, quantisers, and the checks of operands."""
