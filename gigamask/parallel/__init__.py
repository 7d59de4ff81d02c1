"""How the work meets the hardware: the precision it is done in."""
