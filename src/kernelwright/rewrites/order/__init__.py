"""The order in which the built-in policy proposes candidates: how it is applied, and how it is learnt."""
