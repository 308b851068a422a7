"""The parts of a block. Each declares the standard values it computes."""
