"""Search and learning over candidates. Rewards are computed from recorded evaluations only."""
