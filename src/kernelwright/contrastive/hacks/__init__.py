"""Finds known cheats that resemble a candidate, and asks for a second opinion on it.

Nothing here accepts or rejects: a checker's vote only triggers deeper checks by the judge. See `docs/hacks.md`.
"""

from __future__ import annotations

from kernelwright.contrastive.families import Family
from kernelwright.contrastive.hacks.checker import (
    AdversarialChecker,
    HackChecker,
    Opinion,
    Review,
    StructuralChecker,
    Vote,
    deeper,
)
from kernelwright.contrastive.hacks.database import HackDatabase, Neighbour, Pattern, Retriever, Sign, profile

__all__ = [
    "AdversarialChecker",
    "Family",
    "HackChecker",
    "HackDatabase",
    "Neighbour",
    "Opinion",
    "Pattern",
    "Retriever",
    "Review",
    "Sign",
    "StructuralChecker",
    "Vote",
    "deeper",
    "profile",
]
