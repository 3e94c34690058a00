"""Decides which work may begin on which device: grants leases of a slot, GPU memory and exclusive use.

It is pure: work is asked for, granted and given back, and time is a number that the caller passes in. The rules:

- Work whose need of memory is known begins when so much is left. Few smaller ones pass it (`PASSES_MAX`).
- Work that failed while others had memory waits for twice the memory that it asked for, and after that to be alone.
- Work that has to be alone waits until nothing else is left to do on a device. One that waits for it at once keeps all
  others out, which took half the time of a search (results/kernelbench-h200). It begins where judges are idle: a task that
  waited to be screened alone kept six of them from beginning anything for minutes
  (`results/kernelbench-h200/today-fifths-3-4-h200`).
- A task whose screening failed beside many others is screened beside few first, then alone, as in all later rounds.
- Slots that have a process come first: to start another takes up to eight seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

PASSES_MAX = 6
"""Requests that may pass one that waits for memory. After that the device fills no further until it fits: of two H200s'
searches one judged 19 small candidates, five of them of one task, while three of the most promising tasks waited for 77 to
117 GiB until the time ended (results/kernelbench-h200/today-left-1-h200). Our choice."""
QUIET_S = 2.0
"""Time without other work after which a device has nothing else to do, seconds. Our choice."""
FEW_AT_ONCE = 4
"""Most tasks that are screened at once on a device while one of them did not fit beside more. Our choice."""
TOO_LARGE = "it may take more memory than a device has"


class Exclusivity(IntEnum):
    """Most requests of its own group that may be at work on a device while one is, that one included."""

    MANY = sys.maxsize
    FEW = FEW_AT_ONCE
    NONE = 1
    """Nothing else, of any group, is at work on the device."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one piece of work at a time."""

    group: str
    device: str
    number: int


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """Work that waits for a lease."""

    group: str
    """Group of slots that it takes one of."""
    memory_bytes: int = 0
    """Memory that it may take at most; 0 where that is not known."""
    others: Exclusivity = Exclusivity.MANY
    elsewhere_than: str | None = None
    """Device that it does not take where there is another."""
    few_first: bool = False
    """True where it is tried with few of its group at work before it has to be alone."""
    why_alone: str | None = None
    """Reason why it has to be alone, for the record."""
    passes: int = 0
    """Requests that came later and began before it, since it waits for memory."""
    is_second_try: bool = False
    """True where it has failed with others at work."""


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A slot, memory of its device and, where it is exclusive, all of the device."""

    request: LeaseRequest
    slot: Slot
    taken_bytes: int

    @property
    def device(self) -> str:
        """Device of the slot."""
        return self.slot.device

    @property
    def is_exclusive(self) -> bool:
        """True where nothing else is at work on the device."""
        return self.request.others is Exclusivity.NONE


@dataclass(slots=True)
class _Device:
    name: str
    memory_bytes: int
    leases: list[Lease] = field(default_factory=list)
    quiet_since_s: float | None = None

    @property
    def taken_bytes(self) -> int:
        return sum(lease.taken_bytes for lease in self.leases)

    @property
    def is_exclusive(self) -> bool:
        return any(lease.is_exclusive for lease in self.leases)

    def of(self, group: str) -> list[Lease]:
        return [lease for lease in self.leases if lease.request.group == group]

    def has_room_for(self, request: LeaseRequest) -> bool:
        """True if memory and the levels of exclusivity let it begin beside what is at work."""
        if self.is_exclusive:
            return False
        same = self.of(request.group)
        if len(same) >= min([request.others, *(lease.request.others for lease in same)]):
            return False
        return not (request.memory_bytes and self.leases) or self.taken_bytes + request.memory_bytes <= self.memory_bytes


class Scheduler:
    """Grants leases.

    Args:
        devices: Memory of each device that work may take, bytes.
        slots: Number of slots on each device by group.
        quiet_s: Time without other work after which a device has nothing else to do, seconds.
    """

    def __init__(self, devices: Mapping[str, int], slots: Mapping[str, int], quiet_s: float = QUIET_S) -> None:
        self._quiet_s = quiet_s
        self._devices = {name: _Device(name, memory) for name, memory in devices.items()}
        # Of each group a device's first slots come before other devices' second ones.
        self._slots = [
            Slot(group, name, number) for group, count in slots.items() for number in range(count) for name in devices
        ]
        self._free = [*self._slots]
        self._warm: set[Slot] = set()
        """Slots whose process has been started."""
        self._line: list[LeaseRequest] = []
        """Requests that may begin while others are at work, in the order in which they came."""
        self._alone: list[LeaseRequest] = []
        """Requests that have to be alone."""

    # --- what goes on ---------------------------------------------------------------------------------------------

    @property
    def slots(self) -> list[Slot]:
        """All slots, in the order in which cold ones are taken."""
        return [*self._slots]

    def free(self, group: str) -> int:
        """Requests of a group that could begin if slots alone mattered, less those that wait for one.

        What waits for memory, or to be alone, leaves its slot to others.
        """
        able = [
            request
            for request in self._line
            if request.group == group and any(device.has_room_for(request) for device in self._places(request))
        ]
        return sum(self._open(device, group) for device in self._devices.values()) - len(able)

    def _open(self, device: _Device, group: str) -> int:
        """Slots of a group that the levels of exclusivity leave on a device."""
        if device.is_exclusive:
            return 0
        same = device.of(group)
        count = sum(slot.group == group and slot.device == device.name for slot in self._slots)
        return max(0, min([count, *(lease.request.others for lease in same)]) - len(same))

    def wants_device(self, group: str) -> bool:
        """True if a request of a group waits until all others leave a device to it."""
        return any(request.group == group for request in self._alone)

    def due_s(self, now_s: float) -> float | None:
        """Seconds until a device has been quiet for long enough; None where nothing waits for that."""
        since = [device.quiet_since_s for device in self._devices.values() if device.quiet_since_s is not None]
        return max(0.0, min(since) + self._quiet_s - now_s) if self._alone and since else None

    # --- what changes it ------------------------------------------------------------------------------------------

    def request(self, request: LeaseRequest) -> None:
        """Have a request wait for its lease."""
        if request.memory_bytes > max(device.memory_bytes for device in self._devices.values()):
            request.others, request.why_alone = Exclusivity.NONE, TOO_LARGE
        (self._alone if request.others is Exclusivity.NONE else self._line).append(request)

    def withdraw(self, request: LeaseRequest) -> None:
        """Forget a request that has no lease."""
        for waiting in (self._line, self._alone):
            if request in waiting:
                waiting.remove(request)

    def grants(self, now_s: float) -> Iterator[Lease]:
        """Leases of all that may begin now."""
        while (lease := self._next(now_s)) is not None:
            yield lease

    def release(self, lease: Lease) -> None:
        """Take a lease back."""
        self._devices[lease.device].leases.remove(lease)
        self._free.append(lease.slot)

    def retry(self, lease: Lease, why: str) -> bool:
        """Take back a lease whose work failed for want of memory; True where it waits for another one, to be tried again."""
        self.release(lease)
        request = lease.request
        if lease.is_exclusive:
            return False
        if request.memory_bytes and not request.is_second_try:
            # A neighbour may have taken more than it had asked for: four jobs of 11 to 33 GiB waited eight minutes for all
            # others.
            request.memory_bytes *= 2
        elif request.few_first and request.others is Exclusivity.MANY:
            request.others = Exclusivity.FEW
        else:
            request.others, request.why_alone = Exclusivity.NONE, why
        request.is_second_try = True
        self.request(request)
        return True

    def warm(self, slot: Slot, is_warm: bool = True) -> None:
        """Note whether a slot has a process."""
        (self._warm.add if is_warm else self._warm.discard)(slot)

    # --- rules ----------------------------------------------------------------------------------------------------

    def _next(self, now_s: float) -> Lease | None:
        lease = self._next_sharing()
        # Before what has to be alone is looked at: what has just come makes a device busy.
        self._note_quiet(now_s)
        return lease or self._next_alone(now_s)

    def _next_sharing(self) -> Lease | None:
        emptiest = min(self._devices.values(), key=lambda device: device.taken_bytes)
        is_held = False
        for request in sorted(self._line, key=lambda waiting: -waiting.others):  # those that allow the most others first
            is_passed_over = request.passes >= PASSES_MAX
            # One device makes room for those that too many have passed.
            allowed = [
                device
                for device in self._places(request)
                if device.has_room_for(request) and (is_passed_over or not (is_held and device is emptiest))
            ]
            if (slot := self._slot(request.group, allowed)) is not None:
                return self._grant(request, slot)
            is_held |= is_passed_over
        return None

    def _next_alone(self, now_s: float) -> Lease | None:
        for request in self._alone:
            quiet = [
                device
                for device in self._places(request)
                if device.quiet_since_s is not None and now_s - device.quiet_since_s >= self._quiet_s
            ]
            if (slot := self._slot(request.group, quiet)) is not None:
                return self._grant(request, slot)
        return None

    def _note_quiet(self, now_s: float) -> None:
        for device in self._devices.values():
            if self._alone and not device.leases:
                device.quiet_since_s = now_s if device.quiet_since_s is None else device.quiet_since_s
            else:
                device.quiet_since_s = None

    def _places(self, request: LeaseRequest) -> list[_Device]:
        elsewhere = [device for device in self._devices.values() if device.name != request.elsewhere_than]
        return elsewhere or [*self._devices.values()]

    def _slot(self, group: str, devices: Iterable[_Device]) -> Slot | None:
        """A free slot of a group on one of the devices: one with a process, else on the device that does the least."""
        at_work = {device.name: len(device.of(group)) for device in devices}
        able = [slot for slot in self._free if slot.group == group and slot.device in at_work]
        return min(able, key=lambda slot: (slot not in self._warm, at_work[slot.device], slot.number), default=None)

    def _grant(self, request: LeaseRequest, slot: Slot) -> Lease:
        device, waiting = self._devices[slot.device], self._line if request in self._line else self._alone
        if waiting is self._line:
            for earlier in self._line[: self._line.index(request)]:
                earlier.passes += bool(earlier.memory_bytes) and not device.has_room_for(earlier)
        waiting.remove(request)
        self._free.remove(slot)
        lease = Lease(request, slot, device.memory_bytes if request.others is Exclusivity.NONE else request.memory_bytes)
        device.leases.append(lease)
        return lease
