"""Represents schedules of a kernel as states of a game: moves, their legality, and the stall counts that follow."""
