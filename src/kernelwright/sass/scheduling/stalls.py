"""Derives from an order the least stall counts that satisfy every distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernelwright.sass.code.control import MAX_STALL
from kernelwright.sass.hazards.dependences import BlockConstraints

_NOTHING_EXTRA: Mapping[int, int] = {}


def retime(
    order: Sequence[int], constraints: BlockConstraints, extra: Mapping[int, int] = _NOTHING_EXTRA
) -> list[int] | None:
    """Return the least stall counts for a block's instructions in `order`, or None if there are none.

    Args:
        order: the block's instructions; must already respect every predecessor relation.
        extra: cycles by which an instruction is to stall longer than its least stall. Distances that
        hold with less stall hold with more, so this only takes slack from what is added elsewhere.
    """
    floors, gaps, after_entry = constraints.floors, constraints.gap_before, constraints.after_entry
    predecessors = constraints.predecessors
    ports, spacings = constraints.ports, constraints.spacings
    drains = constraints.drains
    latest: list[int | None] = [None] * len(spacings)
    stalls = [floors[i] for i in order]
    if extra:
        stalls = [stall + extra.get(i, 0) for stall, i in zip(stalls, order, strict=True)]
        if max(stalls) > MAX_STALL:
            return None
    issued: dict[int, int] = {}
    time = 0
    for position, index in enumerate(order):
        if position:
            gap = gaps.get(index)
            if gap is not None and gap > stalls[position - 1]:
                time += gap - stalls[position - 1]
                stalls[position - 1] = gap
        needed = after_entry[index]
        for u, cycles in predecessors[index].items():
            earliest = issued[u] + cycles
            if earliest > needed:
                needed = earliest
        port = ports.get(index)
        if port is not None:
            for earlier, cycles in spacings[port]:
                neighbour = latest[earlier]
                if neighbour is not None and issued[neighbour] + cycles > needed:
                    needed = issued[neighbour] + cycles
        if needed > time:
            missing = needed - time
            if position and stalls[position - 1] + missing <= MAX_STALL and order[position - 1] not in drains:
                stalls[position - 1] += missing
                time = needed
            else:
                demands = dict(predecessors[index])
                for earlier, cycles in spacings[port] if port is not None else ():
                    neighbour = latest[earlier]
                    if neighbour is not None:
                        demands[neighbour] = max(cycles, demands.get(neighbour, 0))
                delayed = _delay(order[:position], stalls, issued, time, demands, after_entry[index], drains)
                if delayed is None:
                    return None
                time = delayed
        if port is not None:
            latest[port] = index
        issued[index] = time
        time += stalls[position]
    # The last instruction usually transfers control; its own stall is left as it is.
    last = order[-1]
    tail = stalls[-1]
    demands = {i: cycles - tail for i, cycles in constraints.before_exit.items() if i != last}
    begin = _delay(order[:-1], stalls, issued, issued[last], demands, constraints.duration - tail, drains)
    if begin is None or tail < constraints.before_exit[last]:
        return None
    return [0 if i in drains else stall for i, stall in zip(order, stalls, strict=True)] if drains else stalls


def _delay(
    earlier: Sequence[int],
    stalls: list[int],
    issued: dict[int, int],
    time: int,
    demands: Mapping[int, int],
    not_before: int,
    drains: frozenset[int],
) -> int | None:
    """Raise stalls of `earlier` until the instruction after them issues late enough; the latest absorbs the delay first.

    Distances that already hold only grow. `stalls`, by position, and `issued`, by instruction, are changed in place.

    Args:
        time: issue time of the instruction now.
        demands: for each u in `earlier`: least distance from u.
        not_before: least issue time.
        drains: instructions whose stall cannot be raised.

    Returns:
        The new issue time, or None when no stall counts satisfy the demands.
    """
    for position in range(len(earlier) - 1, -2, -1):
        needed = max([not_before] + [issued[u] + cycles for u, cycles in demands.items()])
        if needed <= time:
            return time
        if position < 0:
            break
        if earlier[position] in drains:
            continue
        added = min(MAX_STALL - stalls[position], needed - time)
        if added > 0:
            stalls[position] += added
            time += added
            for i in earlier[position + 1 :]:
                issued[i] += added
    return None
