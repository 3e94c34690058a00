"""Asks a policy for candidates of one task as places to look at them become free, up to a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kernelwright.errors import NothingUsableError
from kernelwright.records import Candidate, Evaluation, Task
from kernelwright.records.decisions import is_worth_its_compiler, next_of
from kernelwright.records.policy import Context, Policy
from kernelwright.records.screened import Compiles, Screened, compiles
from kernelwright.records.variants import variants


class Proposals:
    """Proposals for one task, and what has been found of them.

    Args:
        task: The task.
        policy: Proposer of candidates.
        device: Resolved name.
        budget: Proposals to look at, those found already included.
        seed: Seed of the policy.
        history: Verdicts so far; the caller may add to it.
        screened: Estimates so far; the caller appends to it.
        tell: Callback for what the policy has to say, and whether that lasts.
    """

    def __init__(
        self,
        task: Task,
        policy: Policy,
        device: str,
        budget: int,
        seed: int,
        history: Sequence[Evaluation],
        screened: list[Screened],
        tell: Callable[[str, bool], None] = lambda text, lasting: None,
    ) -> None:
        self._task, self._policy, self._device, self._budget, self._seed = task, policy, device, budget, seed
        self.history, self.screened, self._tell = history, screened, tell
        self._given: dict[str, Candidate] = {}
        self._waiting: list[Candidate] = []

    @property
    def _context(self) -> Context:
        return Context(
            task=self._task,
            device=self._device,
            history=tuple(self.history),
            seed=self._seed,
            screened=tuple(self.screened),
        )

    @property
    def done(self) -> int:
        """Proposals that were looked at."""
        return len(self._context.seen)

    @property
    def left(self) -> Compiles | None:
        """The quickest compiler among the proposals that are known and still to be looked at; None where there are none."""
        seen = self._context.seen
        left = [*self._waiting, *(given for sha256, given in self._given.items() if sha256 not in seen)]
        return min((compiles(candidate.source) for candidate in left), default=None)

    def _may_stay(self, waiting: Candidate) -> bool:
        """True for a proposal that is no reason to leave the policy unasked: it comes last of all, or never."""
        is_last = compiles(waiting.source) is Compiles.VARIANTS
        return is_last or not is_worth_its_compiler(waiting, self.screened)

    def candidates(self, slots: int, takes: Callable[[Compiles], bool] | None = None) -> Iterator[Candidate | None]:
        """Candidates to look at, one after the other; None where the next depends on one that is being looked at.

        The policy is asked for as many as there are slots, when none is left of those that it gave before. With `takes`,
        which tells whether a process is free for a candidate of a kind, it is asked for all that the budget has room for,
        and they are taken in the order of `schedule`.
        """
        taken = self._context.seen
        given, waiting = self._given, self._waiting
        asked_at = None
        while len(taken) < self._budget:
            seen = self._context.seen
            busy = [candidate for sha256, candidate in given.items() if sha256 not in seen]
            if asked_at != self.done and all(takes and self._may_stay(candidate) for candidate in waiting):
                asked_at = self.done
                self._tell("proposing", False)
                most = self._budget - self.done + len(waiting)
                try:
                    # It does not know of those at work, and may name them again.
                    proposed = self._policy.propose(self._context, most if takes else min(slots + len(busy), most))
                except NothingUsableError as error:
                    if not taken:
                        raise
                    self._tell(str(error), True)
                    return
                known = taken | {candidate.sha256 for candidate in waiting}
                # Every other place is for the knobs of what was found so far, and all once the policy has nothing more.
                new = sum(candidate.sha256 not in known for candidate in proposed)
                proposed = [*variants(self.screened, known, max(1, slots - new, slots // 2)), *proposed]
                waiting += {candidate.sha256: candidate for candidate in proposed if candidate.sha256 not in known}.values()
            candidate = next_of(waiting, busy, self.screened, takes) if takes else next(iter(waiting), None)
            if candidate is not None:
                given[candidate.sha256] = candidate
                waiting.remove(candidate)
                taken.add(candidate.sha256)
                yield candidate
            elif busy or asked_at != self.done:
                yield None
            else:
                self._tell("the rest is not worth its compiler" if waiting else "the policy has nothing more to try", True)
                return
