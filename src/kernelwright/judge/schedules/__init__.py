"""The verdict on schedules of machine code: run contained, compared, timed."""
