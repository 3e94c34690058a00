"""Estimates one candidate after another in a process that holds the task: a check on few inputs and a paired timing.

It runs behind the walls of a worker. Candidates share its memory with the reference and the clock, so that any of them
can forge every answer: what it says is an estimate, never a verdict (`records.screened`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from kernelwright.judge.check.bounds import Bounds, Question
from kernelwright.judge.check.compare import apart
from kernelwright.judge.check.facts import measure_task
from kernelwright.judge.check.findings import CheckFinding, CheckFindings, Demands, form_findings, interface_findings
from kernelwright.judge.check.oracle import OutOfDomainError, State, tensors_of
from kernelwright.judge.check.trial import Trial
from kernelwright.judge.isolation.gate import DeviceGate
from kernelwright.judge.isolation.side import BuiltModule, Described, Output
from kernelwright.judge.isolation.workers import Workers
from kernelwright.judge.settings import Settings
from kernelwright.judge.timing.clocks import CacheFlush
from kernelwright.judge.worker.harness import Harness
from kernelwright.judge.worker.inspection import PRECISIONS, Library, global_state, operations_of
from kernelwright.judge.worker.structure import OutputMetadata, flatten, unflatten, walk
from kernelwright.records import Candidate, Label, Reason, Task
from kernelwright.tasks import INPUT_SETS, bring_to_life, device_is_full, is_inexact

SETS = ("own", "signs")
"""Input sets of the check; where the reference is undefined on one, the task's own distribution is drawn again."""
TIMED_BYTES_MAX = 1 << 30
"""Inputs beyond which one draw is timed instead of two."""
FLUSH_BYTES_ON_CPU = 32 << 20
"""Bytes written between calls on a processor. All of a server's last-level cache would take longer than most calls; this
much empties the caches of a core."""
PAIRS_MIN, PAIRS_MAX = 7, 50
TIMED_S = 0.3
"""Time that the calls of one candidate and its reference may take beyond `PAIRS_MIN` pairs, seconds."""
SHORT_CALL_US, SERIES = 20.0, 8
"""Latency on a processor below which so many calls are timed together: its clock costs a good part of a microsecond."""
WARMUP = 3
_BANDWIDTH_BYTES = 512 << 20
_PRODUCT_SIDE = 4096
"""Rows and columns of the product whose rate is measured. Our choice."""
_PRODUCT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types of tensors whose products tensor cores take, float32 as TF32."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Posed:
    """Inputs, their truth and the form of the reference's answer."""

    question: Question
    seed: int | None
    described: Described
    strides_count: bool


class ScreeningHarness(Harness):
    """State of one screening process: the task, its reference, and the candidate at work."""

    def __init__(self, config: dict[str, Any], files: list[int]) -> None:
        super().__init__(config, files)
        self.posed: list[_Posed] = []
        self._keeps_state = False
        """True if a call of the reference depends on the calls before it."""
        self.timed: list[list[Any]] = []
        self._numbers = itertools.count()
        self._thread: ThreadPoolExecutor | None = None
        """Thread of a candidate that has cuDNN search for algorithms. Each thread keeps the first plan that it finds for a
        convolution, with the search or without: beside the reference's calls there would be nothing left to search."""

    def _run(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Do what calls the candidate, in its own thread if it has one."""
        return self._thread.submit(work, *arguments).result() if self._thread else work(*arguments)

    def op_task(self, message: dict[str, Any]) -> dict[str, Any]:
        """Load the task. Nothing runs on the device yet."""
        self._settings = Settings.model_validate_json(message["settings"])
        self._live = bring_to_life(Task.model_validate_json(message["task"]))
        return {}

    def op_truth(self, message: dict[str, Any]) -> dict[str, Any]:
        """Build the reference and compute what its outputs should be and how far others may be from them."""
        settings, live = self._settings, self._live
        self.facts = facts = measure_task(live, self.device)
        self._trial = Trial(
            facts=facts,
            candidate=Candidate(source=""),
            settings=settings,
            findings=CheckFindings(Demands.of(settings)),
            workers=cast(Workers, None),  # this process starts no other
            directory=Path(self.config["private"]),
            gate=DeviceGate(self.device),
        )
        self._state = facts.oracle.initial_state if Label.STATE_DIFFERS not in settings.forbid else facts.weights
        self._bounds = Bounds(self._trial)
        for name in SETS:
            self.posed.append(self._pose(name))
        own = self.posed[0].question.inputs()
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(own))
        self.timed = [own] + ([facts.draw()] if size < TIMED_BYTES_MAX else [])
        moved = self._state_now()
        self._keeps_state = facts.stateful or any(value is not self._state[key] for key, value in moved.items())
        self._start_reference()
        self._flush = CacheFlush(self.device, FLUSH_BYTES_ON_CPU)
        size += sum(spec.span_bytes for spec in facts.shapes.outputs)
        least_us = operations_us = reference_us = memory_bytes = None
        if self.device.type == "cuda":
            memory_bytes = torch.cuda.max_memory_reserved(self.device)
            least_us, reference_us = size / self.bytes_per_us(), self._whole_us(own)
            operations_us = self.operations_us(self.posed[0])
            torch.cuda.empty_cache()
        self.before, self.library, self._base = global_state(), Library(), self._held_bytes()
        known = {"least_us": least_us, "operations_us": operations_us, "memory_bytes": memory_bytes}
        return known | {"reference_us": reference_us}

    def _whole_us(self, inputs: list[Any]) -> float:
        """Time of a call of the reference until the device rests, microseconds; about, since others may be at work there."""
        with torch.no_grad():
            start_s = time.perf_counter()
            self.reference(*_copied(inputs))
            self.clock.settle()
        return 1e6 * (time.perf_counter() - start_s)

    def bytes_per_us(self, size_bytes: int = _BANDWIDTH_BYTES) -> float:
        """Bandwidth of the device's memory: the faster of writing and reading. An H200 writes 3.2 TB/s and reads 4.3. A
        processor has none that holds: its caches are not emptied."""
        buffer = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
        read = buffer.view(torch.float32)
        return size_bytes / min(self.fastest_us(work) for work in (buffer.fill_, lambda _: read.sum()))

    def operations_us(self, posed: _Posed) -> float | None:
        """Time of the reference's products, convolutions and attention at the rate of a large product, microseconds.

        None where they cannot be counted, or where their type has no such rate.
        """
        inputs = posed.question.inputs()
        try:
            operations = operations_of(lambda: self._call_reference(inputs, posed.seed))
        except OutOfDomainError:
            # The reference has answered these inputs before: one of its operators cannot run while it is counted.
            return None
        if not operations:
            return 0.0
        dtype = product_dtype([*tensors_of(inputs), *self._state.values()])
        return operations / self.operations_per_us(dtype) if dtype else None

    def operations_per_us(self, dtype: torch.dtype) -> float:
        """Rate of a large product, float32 as TF32; kernels that keep its accuracy take several such products for one."""
        side, generator = _PRODUCT_SIDE, self.facts.generator
        one, other = (torch.randn(side, side, dtype=dtype, device=self.device, generator=generator) for _ in range(2))
        result = torch.empty_like(one)
        with _tf32_in_products():
            return 2 * side**3 / self.fastest_us(lambda _: torch.mm(one, other, out=result))

    def fastest_us(self, work: Callable[[int], object]) -> float:
        """Least latency of five calls, each with its number."""
        took_us = []
        for number in range(5):
            self.clock.ready()
            self.clock.start()
            work(number)
            self.clock.stop()
            self.clock.settle()
            took_us.append(self.clock.elapsed_us())
        return min(took_us)

    def _pose(self, name: str) -> _Posed:
        facts = self.facts
        chosen = next(one for one in INPUT_SETS if one.name == name)
        try:
            return self._posed_on(facts.draw(chosen), strides_count=not chosen.layout)
        except OutOfDomainError:
            return self._posed_on(facts.draw(), strides_count=True)

    def _posed_on(self, inputs: list[Any], *, strides_count: bool) -> _Posed:
        training, seed = self.facts.oracle.training, self.facts.call_seed()
        self._start_reference()
        if self.facts.stateful or self.facts.has_buffers:
            self._call_as_candidates(inputs, seed)
        state = self._state_now()
        truth = self._bounds.truth(inputs, state, training)
        result = self._call_reference(inputs, seed)
        self.clock.settle()  # whoever stops this process waits for what it has launched
        described, outputs = _described(result)
        del result  # so that `around` can let go of it
        question = self._bounds.around(inputs, state, training, truth, outputs)
        return _Posed(question, seed, described, strides_count)

    def _start_reference(self) -> None:
        """Have a reference that is as a candidate before its first call.

        A state beside the `state_dict` has moved with each call that measured the task: such a reference is built anew, its
        module too, which may hold the state.
        """
        facts = self.facts
        self.reference = facts.oracle.model
        if facts.stateful:
            self.reference = bring_to_life(facts.live.task).model(facts.build_seed, self.device)
        self.reference.load_state_dict(self._state, strict=False)
        self.reference.train(facts.oracle.training)

    def _call_as_candidates(self, inputs: list[Any], seed: int | None) -> None:
        """Call the reference as each candidate is called before the next question: `op_call`, then the questions so far.

        Args:
            inputs: Those of the first call where there is no question yet.
            seed: Its seed.
        """
        asked = [(posed.question.inputs(), posed.seed) for posed in self.posed]
        for earlier in [*(asked[:1] or [(inputs, seed)]), *asked]:
            self._call_reference(*earlier)

    def _call_reference(self, inputs: list[Any], seed: int | None) -> Any:
        """One call on copies of inputs. Raises OutOfDomainError where the reference raises."""
        if seed is not None:
            self.seed(seed)
        try:
            with torch.no_grad():
                return self.reference(*_copied(inputs))
        except Exception as error:
            if device_is_full(error):
                raise
            raise OutOfDomainError(f"the reference raised {type(error).__name__}: {error}") from error

    def _state_now(self) -> State:
        """The reference's `state_dict`, with the very tensors of its first state where they have not changed."""
        return {
            key: self._state[key] if torch.equal(value, self._state[key]) else value.clone()
            for key, value in self.reference.state_dict().items()
            if key in self._state
        }

    def op_build(self, message: dict[str, Any]) -> dict[str, Any]:
        """Load one candidate as a fresh module, with the reference's weights."""
        facts = self.facts
        # The server of this process names the module's own frames by it.
        self.config["role"] = f"candidate_{next(self._numbers)}"
        self.config["source"], self.config["class"] = message["source"], "ModelNew"
        if wants_own_thread(message["source"], self.device):
            self._thread = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(self.device,))
        answer = super().op_build({"seed": facts.build_seed, "arguments": facts.arguments})
        built = BuiltModule.model_validate(answer)
        findings = interface_findings(built, facts)
        if refused := self._refused(findings):
            return refused
        assert self.model is not None
        if facts.shapes.state and not any(finding.label is Label.STATE_DIFFERS for finding in findings):
            self.load({key: value.clone() for key, value in self._state.items()})
        return {}

    def op_call(self, message: dict[str, Any]) -> dict[str, Any]:
        """The candidate's first call, in which compilers work."""
        self._run(self._call_first)
        return {}

    def _call_first(self) -> None:
        assert self.model is not None
        first = self.posed[0]
        if first.seed is not None:
            self.seed(first.seed)
        with torch.no_grad():
            self.model(*_copied(first.question.inputs()))
        self.clock.settle()

    def op_check(self, message: dict[str, Any]) -> dict[str, Any]:
        """Compare its outputs on each input set with the truth; then call a reference that keeps a state as often."""
        for posed in self.posed:
            if refused := self._run(self._refusal, posed):
                return refused
        if self._keeps_state and self._trial.settings.timed:
            self._start_reference()
            self._call_as_candidates(self.posed[0].question.inputs(), self.posed[0].seed)
            self.clock.settle()
        return {}

    def _refusal(self, posed: _Posed) -> dict[str, Any] | None:
        model = self.model
        assert model is not None
        inputs = _copied(posed.question.inputs())
        if posed.seed is not None:
            self.seed(posed.seed)
        with torch.no_grad():
            result = model(*inputs)
        self.clock.settle()
        described, flat = _described(result)
        dtypes = self.facts.output_dtypes
        if refused := self._refused(form_findings(posed.described, described, dtypes, strides=posed.strides_count)):
            return refused
        given = zip(tensors_of(inputs), tensors_of(posed.question.inputs()), strict=True)
        if not all(torch.equal(mine, theirs) for mine, theirs in given):
            return _refused(Reason.INPUT_MUTATED, "the call changed its inputs")
        found = apart(flat, posed.question.truth)
        del inputs, given, result  # an answer that is too far has the reference run again
        integers = [tensor.new_empty(0) if is_inexact(tensor) else tensor for tensor in flat]
        flat.clear()
        allowed = self._bounds.widened(posed.question, found, integers).tolerance.allowed
        if not found.within(allowed):
            return _refused(Reason.WRONG_OUTPUT, f"error {found}; allowed {allowed}")
        return None

    def _refused(self, findings: Iterable[CheckFinding]) -> dict[str, Any] | None:
        """Refusal for the first finding that decides a verdict; None without one."""
        deciding = next(filter(self._trial.findings.demands.rejects, findings), None)
        return None if deciding is None else _refused(deciding.reason, deciding.detail)

    def op_time(self, message: dict[str, Any]) -> dict[str, Any]:
        """Time calls of the reference and the candidate alternately, on the same inputs, with caches flushed."""
        assert self.model is not None
        sides = (
            functools.partial(self.call_us, self.reference),
            functools.partial(self._run, self.call_us, self.model),
        )
        draws = [_copied(inputs) for inputs in self.timed]  # which a candidate may write to
        warm_us = [[side(draws[0], 1) for _ in range(WARMUP)][-1] for side in sides]
        calls = SERIES if self.device.type == "cpu" and min(warm_us) < SHORT_CALL_US else 1
        start_s = time.perf_counter()
        ratios: list[float] = []
        latencies_us: tuple[list[float], list[float]] = [], []
        while len(ratios) < PAIRS_MIN or (len(ratios) < PAIRS_MAX and time.perf_counter() - start_s < TIMED_S):
            inputs = draws[len(ratios) % len(draws)]
            for index in (0, 1) if len(ratios) % 2 else (1, 0):
                self._flush()
                latencies_us[index].append(max(sides[index](inputs, calls), 1e-3))
            ratios.append(math.log(latencies_us[0][-1] / latencies_us[1][-1]))
        low, _, high = statistics.quantiles(ratios, n=4)
        # Whatever else runs on the device or the host only adds time, and most of it to the longer call.
        reference_us, candidate_us = (statistics.quantiles(found, n=4)[0] for found in latencies_us)
        return {
            "estimate": reference_us / candidate_us,
            "spread": (high - low) / 2,
            "pairs": len(ratios),
            "reference_us": reference_us,
            "candidate_us": candidate_us,
        }

    def call_us(self, model: torch.nn.Module, inputs: list[Any], calls: int) -> float:
        """Mean time of calls one after the other, microseconds: no less than the host took to launch them."""
        with torch.no_grad():
            self.clock.ready()
            self.clock.start()
            begin_ns = time.perf_counter_ns()
            for _ in range(calls):
                model(*inputs)
            launched_us = (time.perf_counter_ns() - begin_ns) / 1e3
            self.clock.stop()
            self.clock.settle()
        # Where another process has the device, the first event waits for it while the host launches, and the two events see
        # the kernels alone: a call whose launches take 80 us read 14. No caller has its result before the call returns.
        return max(self.clock.elapsed_us(), launched_us) / calls

    def op_next(self, message: dict[str, Any]) -> dict[str, Any]:
        """Let go of the candidate; whether the process is as it was, and the memory that it has gained."""
        # Flags that a drop-in may set for its own process; the next candidate must not find them.
        flags = self.before["flags"]
        torch.backends.cudnn.benchmark = flags["cudnn_benchmark"] == "True"
        torch.backends.cudnn.allow_tf32 = flags["cudnn_allow_tf32"] == "True"
        torch.set_float32_matmul_precision(flags["float32_matmul_precision"])
        for backend, part in PRECISIONS:
            torch._C._set_fp32_precision_setter(backend, part, flags[f"{backend}_{part}_fp32_precision"])
        torch.set_num_threads(int(flags["threads"]))
        if self._thread:
            self._thread.shutdown()
            self._thread = None
        clean = self.drop_module()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        held = self._held_bytes()
        return {"clean": clean, **{name: held[name] - self._base[name] for name in held}}

    def _held_bytes(self) -> dict[str, int]:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
        on_device = torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0
        return {"resident_bytes": resident, "device_bytes": on_device}


def harness(config: dict[str, Any], files: list[int]) -> ScreeningHarness:
    """The harness of a screening process, for the server of workers."""
    return ScreeningHarness(config, files)


def wants_own_thread(source: str, device: torch.device) -> bool:
    """True if a candidate's text speaks of cuDNN, whose plans are kept for each thread. A processor's threads cost more."""
    return device.type == "cuda" and "cudnn" in source


def product_dtype(tensors: list[torch.Tensor]) -> torch.dtype | None:
    """Type whose products are timed for a task: the narrowest of its tensors', so that mixed ones get the higher rate.

    None where tensor cores have no rate for it, or this module does not know how to measure it.
    """
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
    narrowest = min(dtypes, key=lambda dtype: dtype.itemsize, default=None)
    return narrowest if narrowest in _PRODUCT_DTYPES else None


@contextlib.contextmanager
def _tf32_in_products() -> Iterator[None]:
    """Allow TF32 in products of float32, and leave every setting as it was."""
    if torch.get_float32_matmul_precision() != "highest":
        yield  # it is allowed already
        return
    products = torch.backends.cuda.matmul
    # The older flag alone would leave "ieee" behind, where nothing was chosen before.
    precision = products.fp32_precision
    products.allow_tf32 = True
    try:
        yield
    finally:
        products.allow_tf32 = False
        products.fp32_precision = precision


def _refused(reason: Reason, detail: str) -> dict[str, Any]:
    return {"reason": str(reason), "detail": detail[:2000]}


def _copied(inputs: list[Any]) -> list[Any]:
    skeleton, tensors = flatten(inputs)
    return cast(list[Any], unflatten(skeleton, [tensor.clone() for tensor in tensors]))


def _described(result: Any) -> tuple[Described, list[torch.Tensor]]:
    """Description of a call's result, in which whose memory it lies in is left out, and its tensors."""
    tensors: list[torch.Tensor] = []
    strange: list[str] = []
    skeleton = walk(result, tensors, strange)
    outputs = tuple(Output(**OutputMetadata.of(tensor).to_json(), aliases=()) for tensor in tensors)
    return Described(skeleton=skeleton, strange=tuple(strange), outputs=outputs), tensors
