"""Represents machine code as typed data: containers, listings, instructions, control words, programs."""
