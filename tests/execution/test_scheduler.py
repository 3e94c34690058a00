"""Leases of devices, granted by a simulated clock."""

from __future__ import annotations

import pytest

from kernelwright.execution.scheduler import (
    FEW_AT_ONCE,
    PASSES_MAX,
    QUIET_S,
    TOO_LARGE,
    Exclusivity,
    LeaseRequest,
    Scheduler,
)


class Machine:
    """A scheduler, a clock, and the leases of work by its name."""

    def __init__(self, memory_bytes=10, devices=("cuda:0",), **slots):
        self.scheduler = Scheduler(dict.fromkeys(devices, memory_bytes), slots or {"judges": 4})
        self.now_s, self.requests, self.leases, self.begun = 0.0, {}, {}, []

    def ask(self, name, memory_bytes=0, group="judges", **options):
        self.requests[name] = LeaseRequest(group, memory_bytes, **options)
        self.scheduler.request(self.requests[name])
        return self.begin()

    def begin(self):
        names = {id(request): name for name, request in self.requests.items()}
        began = []
        for lease in self.scheduler.grants(self.now_s):
            began.append(names[id(lease.request)])
            self.leases[began[-1]] = lease
        self.begun += began
        return began

    def end(self, *names):
        for name in names:
            self.scheduler.release(self.leases.pop(name))
        return self.begin()

    def wait(self, seconds=QUIET_S):
        self.now_s += seconds
        return self.begin()

    def crowded(self, name):
        is_waiting = self.scheduler.retry(self.leases.pop(name), "too little")
        return self.begin() if is_waiting else None

    @property
    def at_work(self):
        return {*self.leases}


def test_work_begins_in_turn_as_slots_become_free():
    machine = Machine(judges=2)
    assert [machine.ask(str(number)) for number in range(4)] == [["0"], ["1"], [], []]
    assert machine.scheduler.free("judges") == -2
    assert machine.end("1") == ["2"]
    assert machine.end("0", "2") == ["3"]
    assert machine.scheduler.free("judges") == 1


def test_each_group_has_slots_of_its_own_and_shares_the_memory():
    machine = Machine(judges=1, baselines=1)
    assert machine.ask("a", 6) == ["a"]
    assert machine.ask("b", 6, "baselines") == [], "no memory"
    assert machine.ask("c", 4, "baselines") == ["c"]
    assert machine.end("a") == [], "no slot"
    assert machine.end("c") == ["b"]


def test_a_slot_with_a_process_comes_first_and_else_the_device_that_does_the_least():
    machine = Machine(devices=("cuda:0", "cuda:1"), judges=2)
    for name in "abc":
        machine.ask(name)
    assert [machine.leases[name].device for name in "abc"] == ["cuda:0", "cuda:1", "cuda:0"]
    used = machine.leases["c"].slot
    machine.scheduler.warm(used)
    machine.end("a", "b", "c")
    machine.ask("d")
    assert machine.leases["d"].slot == used
    machine.scheduler.warm(used, is_warm=False)
    machine.end("d")
    machine.ask("e")
    assert machine.leases["e"].slot != used


def test_work_goes_elsewhere_where_there_is_another_device():
    machine = Machine(devices=("cuda:0", "cuda:1"), judges=1)
    machine.ask("a", elsewhere_than="cuda:0")
    assert machine.ask("b", elsewhere_than="cuda:0") == []
    assert machine.ask("c") == ["c"]
    assert (machine.leases["a"].device, machine.leases["c"].device) == ("cuda:1", "cuda:0")
    assert Machine(judges=1).ask("d", elsewhere_than="cuda:0") == ["d"], "where there is none it does not wait"


# --- memory -----------------------------------------------------------------------------------------------------------


def test_work_waits_until_the_memory_that_it_may_take_is_left_and_others_pass_it():
    machine = Machine()
    for name, memory_bytes in (("a", 6), ("b", 5), ("c", 4), ("d", 0)):
        machine.ask(name, memory_bytes)
    assert machine.at_work == {"a", "c", "d"}, "what takes little of it, or nobody knows how much, does not wait"
    assert machine.scheduler.free("judges") == 1, "what waits for memory leaves its slot to others"
    assert machine.end("a") == ["b"]


def test_where_nothing_is_at_work_anything_fits():
    assert Machine().ask("a", 10) == ["a"]


@pytest.mark.parametrize("group", ["judges", "baselines"])
def test_few_pass_what_waits_for_memory(group):
    machine = Machine(judges=PASSES_MAX + 4, baselines=PASSES_MAX + 4)
    machine.ask("first", 4)
    machine.ask("large", 9)
    small = [str(number) for number in range(PASSES_MAX + 1)]
    for name in small:
        machine.ask(name, 1, group)
    assert machine.at_work == {"first", *small[:-1]}
    assert machine.end(*small[:-1]) == [], "no further one, though it would fit"
    assert machine.end("first") == ["large", small[-1]]


def test_one_device_makes_room_for_what_too_many_have_passed():
    machine = Machine(2 * PASSES_MAX, ("cuda:0", "cuda:1"), judges=4 * PASSES_MAX)
    for name, memory_bytes in (("a", PASSES_MAX), ("b", PASSES_MAX), ("large", 2 * PASSES_MAX)):
        machine.ask(name, memory_bytes)
    small = [str(number) for number in range(PASSES_MAX + 2)]
    for name in small:
        machine.ask(name, 1)
    places = [machine.leases[name].device for name in small]
    assert places[-2:] in (["cuda:0"] * 2, ["cuda:1"] * 2), "the fuller device alone takes more"
    assert machine.end("a", "b") == []


def test_what_takes_more_than_a_device_has_is_alone_without_being_tried_beside_others():
    machine = Machine()
    machine.ask("small", 1)
    machine.ask("large", 11)
    assert machine.end("small") == []
    assert machine.wait() == ["large"]
    assert machine.leases["large"].request.why_alone == TOO_LARGE


def test_what_failed_beside_others_waits_for_twice_its_memory_and_then_to_be_alone():
    machine = Machine()
    machine.ask("other", 4)
    machine.ask("a", 2)
    assert machine.crowded("a") == ["a"], "it does not wait for the others"
    assert machine.leases["a"].taken_bytes == 4
    assert machine.crowded("a") == []
    assert (machine.end("other"), machine.wait()) == ([], ["a"])
    assert machine.leases["a"].request.why_alone == "too little"
    assert not machine.scheduler.retry(machine.leases.pop("a"), "too little"), "it is not tried a third time"
    assert machine.ask("b", 10) == ["b"], "its lease was given back"


@pytest.mark.parametrize("memory_bytes", [0, 6])
def test_what_has_no_known_need_or_too_large_a_one_is_alone_next(memory_bytes):
    machine = Machine()
    machine.ask("a", memory_bytes)
    assert machine.crowded("a") == []
    assert machine.wait() == ["a"]
    assert machine.leases["a"].is_exclusive


# --- exclusive use ----------------------------------------------------------------------------------------------------


def test_what_has_to_be_alone_waits_until_nothing_else_is_left_to_do():
    machine = Machine(judges=3, baselines=1, rounds=1)
    machine.ask("a")
    for name, group in (("b", "judges"), ("c", "baselines"), ("d", "rounds")):
        machine.ask(name, group=group)
    machine.crowded("a")
    for name in "bcd":
        assert machine.wait(10 * QUIET_S) == []
        machine.end(name)
    assert machine.scheduler.due_s(machine.now_s) == QUIET_S
    assert machine.wait(QUIET_S / 2) == []
    assert machine.ask("e") == ["e"], "what comes meanwhile goes first"
    machine.end("e")
    assert machine.wait(QUIET_S / 2) == []
    assert machine.wait(QUIET_S / 2) == ["a"]


def test_nothing_else_begins_on_a_device_that_is_taken_alone():
    machine = Machine(devices=("cuda:0", "cuda:1"), judges=1, rounds=2)
    machine.ask("a", 11)
    machine.wait()
    assert machine.scheduler.free("rounds") == 2
    for number in range(4):
        machine.ask(str(number), group="rounds")
    machine.ask("b", 1)
    assert {machine.leases[name].device for name in machine.at_work - {"a"}} == {"cuda:1"}
    assert machine.at_work == {"a", "b", "0", "1"}
    assert machine.end("a") == ["2", "3"]


def test_what_has_to_be_alone_is_so_in_turn():
    machine = Machine(judges=2)
    for name in "abc":
        machine.ask(name, 11)
    assert machine.wait() == ["a"]
    assert (machine.end("a"), machine.wait(), machine.end("b"), machine.wait()) == ([], ["b"], [], ["c"])
    assert machine.scheduler.due_s(machine.now_s) is None


# --- rounds of screening ----------------------------------------------------------------------------------------------


def rounds(machine, *names, **options):
    for name in names:
        machine.ask(name, group="rounds", few_first=True, **options)


def test_a_task_that_did_not_fit_is_tried_beside_few_and_then_alone():
    machine = Machine(rounds=2)
    rounds(machine, "large")
    levels = []
    while machine.crowded("large") is not None:
        levels.append(machine.requests["large"].others)
        machine.wait()
    assert levels == [Exclusivity.FEW, Exclusivity.NONE]
    assert machine.ask("next", group="rounds") == ["next"]


def test_few_are_at_work_while_one_is_that_did_not_fit_beside_more():
    machine = Machine(rounds=3 * FEW_AT_ONCE)
    rounds(machine, "medium", *(f"small-{number}" for number in range(FEW_AT_ONCE + 1)))
    assert machine.crowded("medium") == [], "more are at work"
    machine.end("small-0")
    assert machine.end("small-1") == ["medium"]
    assert len(machine.at_work) == FEW_AT_ONCE
    assert machine.scheduler.free("rounds") == 0
    rounds(machine, *(f"later-{number}" for number in range(FEW_AT_ONCE)))
    assert len(machine.at_work) == FEW_AT_ONCE, "others that come meanwhile wait too"
    assert machine.end("medium") == [f"later-{number}" for number in range(FEW_AT_ONCE)]


def test_those_that_allow_more_others_go_first():
    machine = Machine(rounds=1)
    rounds(machine, "a")
    rounds(machine, "alone", others=Exclusivity.NONE)
    rounds(machine, "few", others=Exclusivity.FEW)
    rounds(machine, "many")
    assert machine.scheduler.wants_device("rounds")
    assert (machine.end("a"), machine.end("many"), machine.end("few"), machine.wait()) == (["many"], ["few"], [], ["alone"])
    assert not machine.scheduler.wants_device("rounds")


def test_a_task_that_wants_a_device_waits_for_judges():
    machine = Machine(judges=1, rounds=1)
    machine.ask("judged")
    rounds(machine, "large", others=Exclusivity.NONE)
    assert machine.wait(100) == []
    machine.end("judged")
    assert machine.wait() == ["large"]


def test_a_request_that_is_withdrawn_is_forgotten():
    machine = Machine(judges=1)
    machine.ask("a")
    machine.ask("b")
    machine.ask("c", 11)
    machine.scheduler.withdraw(machine.requests["b"])
    machine.scheduler.withdraw(machine.requests["c"])
    assert (machine.end("a"), machine.wait()) == ([], [])
