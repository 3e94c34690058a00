"""The harness beside a candidate and the formats it shares with the judge; not trusted in that process."""
