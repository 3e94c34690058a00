"""States the hardware's rules of timing and dependence that every legal schedule respects."""
