"""Runs beside a candidate: the harness and the formats it shares with the judge. It is not trusted in that process."""
