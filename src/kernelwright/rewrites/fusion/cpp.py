"""Prints programs as C++ for a CPU: ATen's vector type along the innermost loop, OpenMP over the outer ones."""

from __future__ import annotations

import hashlib
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kernelwright.rewrites.fusion.kernel import FusedKernel
from kernelwright.rewrites.fusion.program import (
    COLUMNS,
    POINTWISE,
    ROWS,
    WHOLE,
    Dim,
    LoopProgram,
    Pass,
    Signature,
    dense_nest,
    evaluated_again,
    points,
    schedule,
    stores_everything,
)
from kernelwright.rewrites.templates.base import kernel_text

CHUNK = 8192
"""Elements of the innermost loop in one piece of work, and the longest sum that is accumulated without a second level."""
LONGEST_CACHED_ROW = 1 << 15
SERIAL = 1 << 15
"""Points below which one thread does all."""


def accepts(program: LoopProgram) -> bool:
    """True where this printer can print a program; stores do not matter, because they are dense."""
    nest, signature = dense_nest(program)
    if program.windows or program.scans or program.convolution or program.multiplied or program.finds_indices:
        return False
    if program.converts or not program.is_of_float32:
        return False
    if any(stride not in (0, 1) for stride in nest.lanes.strides[: len(signature.loads)]):
        return False
    if nest.kind == COLUMNS and len(nest.reduced) > 1:
        return False
    if nest.kind == WHOLE:
        return len(nest.reduced) == 1 and not stores_everything(program) and len(schedule(program, ()).passes) == 1
    return True


@dataclass(frozen=True, slots=True)
class LanePosition:
    """A place along the innermost loop, which vector lanes run along, in loops inside a row."""

    dims: tuple[Dim, ...] = ()
    names: tuple[str, ...] = ()
    """Name of each loop's index."""
    moves: bool = True
    """True where it is lane `j`; else it is the first one."""
    padded: bool = True
    """True where a zero stands for the lane of a tensor that does not vary along them."""


class CppKernel(FusedKernel):
    """A C++ function and the Python function of the same name that calls it."""

    device_test = "is_cpu"
    neutral: ClassVar = {"sum": "0.0f", "max": "-INFINITY", "min": "INFINITY"}

    def __init__(self, name: str, program: LoopProgram, signature: Signature, strides: tuple[tuple[int, ...], ...]) -> None:
        super().__init__(name, program, signature, strides)
        self.loads = len(self.load_steps)
        self.lane_loads = self.nest.lanes.strides[: self.loads]

    def definition(self) -> str:
        """The Python function."""
        threads = "torch.get_num_threads()" if math.prod(self.program.space) >= SERIAL else "1"

        pointers = ", ".join(f"ctypes.c_void_p({name}.data_ptr())" for name in (*self.given_names, *self.written))
        return "\n".join(self._launcher([f"_library.{self.__name__}({pointers}, ctypes.c_int64({threads}))"]))

    @staticmethod
    def prologue(kernels: Sequence[CppKernel]) -> str:
        """The C++ source of all kernels of a module, and its build."""
        source = kernel_text("fused.cpp.txt") + "\n".join(kernel.source() for kernel in kernels)
        name = "fused_" + hashlib.sha256(source.encode()).hexdigest()[:16]
        return kernel_text("fused_build.py.txt", source=source, name=name)

    def source(self) -> str:
        """The C++ function."""
        arguments = [f"const float* {name}" for name in self.inputs] + [f"float* {name}" for name in self.outputs]
        head = f'extern "C" void {self.__name__}({", ".join(arguments)}, int64_t threads) {{'
        return "\n".join([head, textwrap.indent(self._printed(), "    "), "}"])

    def text(self) -> str:
        """All of its own text, by which equal kernels are found."""
        return self.source() + self.definition()

    def _printed(self) -> str:
        kinds = {POINTWISE: self._pointwise, ROWS: self._rows, COLUMNS: self._columns, WHOLE: self._whole}
        return kinds[self.nest.kind]()

    def _literal(self, number: float) -> str:
        if math.isinf(number):
            return f"V({'-' if number < 0 else ''}INFINITY)"
        return f"V({float(number)!r}f)"

    def _function(self, name: str, operands: Sequence[str]) -> str:
        if name in ("maximum", "minimum"):
            return f"at::vec::{name}({operands[0]}, {operands[1]})"
        if name == "where":
            return f"V::blendv({operands[2]}, {operands[1]}, {operands[0]})"
        return f"{operands[0]}.{name}()"

    def _assign(self, index: int, text: str) -> str:
        return f"const V v{index} = {text};"

    def _pointers(self, dims: Sequence[Dim], names: Sequence[str]) -> list[str]:
        """Pointers of all tensors at a position of the outer loops."""
        lines = []
        for tensor in range(self.loads + len(self.outputs)):
            pointer = f"const float* p{tensor}" if tensor < self.loads else f"float* q{tensor - self.loads}"
            offset = " + ".join(["0", *self._terms(tensor, dims, names)])
            lines.append(f"{pointer} = {self._tensor(tensor)} + {offset};")
        return lines

    @staticmethod
    def _terms(tensor: int, dims: Sequence[Dim], names: Sequence[str]) -> list[str]:
        """The share of each loop in a tensor's offset."""
        return [f"{name} * {dim.strides[tensor]}" for dim, name in zip(dims, names, strict=True) if dim.strides[tensor]]

    @staticmethod
    def _indices(dims: Sequence[Dim], names: Sequence[str]) -> list[str]:
        """Split `rest` into the indices of nested loops."""
        loops = reversed(list(zip(dims, names, strict=True)))
        return [f"const int64_t {name} = rest % {dim.size}; rest /= {dim.size};" for dim, name in loops]

    def _load(self, index: int, at: LanePosition) -> str:
        tensor = self.load_steps.index(index)
        terms = self._terms(tensor, at.dims, at.names)
        if self.lane_loads[tensor] and at.moves:
            terms.append("j")
        elif not terms or at.padded:
            terms.append("0")
        place = " + ".join(terms)
        if self.lane_loads[tensor]:
            return f"const V v{index} = V::loadu(p{tensor} + {place}, n);"
        return f"const V v{index} = V(p{tensor}[{place}]);"

    def _pointwise(self) -> str:
        lanes, outer = self.nest.lanes, self.nest.outer[:-1]
        names = self._numbered("i", outer)
        chunks = -(-lanes.size // CHUNK)
        varying, constant = [], []
        for index, step in enumerate(self.program.steps):
            if step.name != "load":
                varying.append(self._step(index))
            elif self.lane_loads[self.load_steps.index(index)]:
                varying.append(self._load(index, LanePosition()))
            else:
                constant.append(self._load(index, LanePosition()))
        stores = [f"v{step}.store(q{number} + j, n);" for number, step in self.full_stores]
        return "\n".join(
            [
                "#pragma omp parallel for schedule(static) num_threads(threads) if(threads > 1)",
                f"for (int64_t task = 0; task < {points(outer) * chunks}; ++task) {{",
                f"    int64_t rest = task / {chunks};",
                f"    const int64_t start = (task % {chunks}) * {CHUNK};",
                f"    const int64_t stop = std::min<int64_t>(start + {CHUNK}, {lanes.size});",
                *_indent([*self._indices(outer, names), *self._pointers(outer, names), *constant]),
                *_indent(_lane_loop([*varying, *stores])),
                "}",
            ]
        )

    def _row_steps(self, indices: Sequence[int]) -> list[str]:
        return self._steps(indices, LanePosition(moves=False))

    def _across(self, index: int, name: str) -> str:
        """One number out of the lanes of a reduction."""
        return f"across({name}{index}, '{_sign(self._name_of(index))}')"

    def _rows(self) -> str:
        plan = schedule(self.program, tuple(step for _, step in self.full_stores))
        loops, row_points = self.nest.reduced[:-1], points(self.nest.reduced)
        inner = self._numbered("r", loops)
        place = " + ".join(
            [f"{name} * {points(self.nest.reduced[level + 1 :])}" for level, name in enumerate(inner)] + ["j"]
        )
        cached = {
            index: f"cache + {number * row_points} + {place}, n"
            for number, index in enumerate(plan.cached)
            if row_points <= LONGEST_CACHED_ROW
        }
        names = self._numbered("i", self.nest.outer)
        lines: list[str] = [*self._indices(self.nest.outer, names), *self._pointers(self.nest.outer, names)]
        lines += self._row_steps(plan.rows_before)
        kept: set[int] = set()
        for number, item in enumerate(plan.passes):
            computes = item.computes if cached else evaluated_again(self.program, plan.passes, number)
            body = self._computed(computes, cached, kept, LanePosition(loops, tuple(inner)))
            lines += [*self._reset(item), *self._row_loop(item, body, loops, inner)]
            kept |= set(computes) & set(cached)
            lines += [f"const V v{index}({self._across(index, 'a')});" for index in item.reduces]
            lines += self._row_steps(item.rows_after)
        lines += self._row_outputs()
        return self._parallel(f"{points(self.nest.outer)}", lines, f"{len(cached) * row_points} + WIDTH" * bool(cached))

    def _reset(self, item: Pass) -> list[str]:
        return [f"V a{index}({self._neutral(index)});" for index in item.reduces]

    def _computed(self, indices: Sequence[int], cached: dict[int, str], kept: set[int], at: LanePosition) -> list[str]:
        """The steps of a pass. `cached` says where a step is kept for later passes, `kept` which steps are there already."""
        lines = []
        for index in indices:
            if index in kept:
                lines.append(f"const V v{index} = V::loadu({cached[index]});")
                continue
            lines += self._steps([index], at)
            if index in cached:
                lines.append(f"v{index}.store({cached[index]});")
        return lines

    def _row_loop(self, item: Pass, body: list[str], loops: Sequence[Dim], names: Sequence[str]) -> list[str]:
        """One pass along a row, in blocks short enough for a plain sum."""
        body = [*body, *(self._into_chunk(index) for index in item.reduces)]
        if not item.reduces:
            for number, step in self.full_stores:
                offset = " + ".join([*self._terms(self.loads + number, loops, names), "j"])
                body.append(f"v{step}.store(q{number} + {offset}, n);")
        size = self.nest.lanes.size
        inner = [
            f"for (int64_t start = 0; start < {size}; start += {CHUNK}) {{",
            *self._chunk(size, item.reduces, body),
            *("    " + _accumulate(self._name_of(index), f"a{index}", f"b{index}") for index in item.reduces),
            "}",
        ]
        for dim, name in reversed(list(zip(loops, names, strict=True))):
            inner = [f"for (int64_t {name} = 0; {name} < {dim.size}; ++{name}) {{", *_indent(inner), "}"]
        return inner

    def _chunk(self, size: int, reduces: Sequence[int], body: Sequence[str]) -> list[str]:
        """The lanes of one chunk that begins at `start`; what is reduced is in b0, b1, ..."""
        lines = [
            f"const int64_t stop = std::min<int64_t>(start + {CHUNK}, {size});",
            *(f"V b{index}({self._neutral(index)});" for index in reduces),
            *_lane_loop(body),
        ]
        return _indent(lines)

    def _into_chunk(self, index: int) -> str:
        """One more vector into a reduction of a chunk; lanes beyond the end change nothing."""
        item = f"V::set(V({self._neutral(index)}), {self._reduced(index)}, n)"
        return _accumulate(self._name_of(index), f"b{index}", item)

    def _row_outputs(self) -> list[str]:
        return [
            f"{{ alignas(64) float lane[WIDTH]; v{step}.store(lane); *q{number} = lane[0]; }}"
            for number, step in self.row_stores
        ]

    def _parallel(self, tasks: str, lines: Sequence[str], cache: str) -> str:
        return "\n".join(
            [
                "#pragma omp parallel num_threads(threads) if(threads > 1)",
                "{",
                *([f"    std::vector<float> buffer({cache});", "    float* cache = buffer.data();"] if cache else []),
                "    #pragma omp for schedule(static)",
                f"    for (int64_t task = 0; task < {tasks}; ++task) {{",
                "        int64_t rest = task;",
                *_indent(lines, 2),
                "    }",
                "}",
            ]
        )

    def _columns(self) -> str:
        """Lanes run along the innermost dimension; each pass walks down the reduced one."""
        plan = schedule(self.program, tuple(step for _, step in self.full_stores))
        lanes, down = self.nest.lanes, self.nest.reduced[-1]
        dims = (*self.nest.outer, *self.nest.inner[:-1])
        names = self._numbered("i", dims)
        blocks = f"(({lanes.size} + WIDTH - 1) / WIDTH)"
        lines = [
            f"const int64_t j = (rest % {blocks}) * WIDTH; rest /= {blocks};",
            f"const int64_t n = std::min<int64_t>(WIDTH, {lanes.size} - j);",
            *self._indices(dims, names),
            *self._pointers(dims, names),
        ]
        lines += self._steps(plan.rows_before, LanePosition())
        cached = {index: f"cache + ({number} * {down.size} + r) * WIDTH" for number, index in enumerate(plan.cached)}

        at = LanePosition((down,), ("r",), padded=False)
        kept: set[int] = set()
        for item in plan.passes:
            body = self._computed(item.computes, cached, kept, at)
            body += [_accumulate(self._name_of(index), f"a{index}", self._reduced(index)) for index in item.reduces]
            if not item.reduces:
                body += [
                    f"v{step}.store(q{number} + r * {down.strides[self.loads + number]} + j, n);"
                    for number, step in self.full_stores
                ]
            lines += self._reset(item)
            lines += [f"for (int64_t r = 0; r < {down.size}; ++r) {{", *_indent(body), "}"]
            kept |= set(item.computes) & set(plan.cached)
            lines += [f"const V v{index} = a{index};" for index in item.reduces]
            lines += self._steps(item.rows_after, at)
        lines += [f"v{step}.store(q{number} + j, n);" for number, step in self.row_stores]
        cache = f"{len(cached) * down.size} * WIDTH + WIDTH" * bool(cached)
        return self._parallel(f"{points(dims)} * {blocks}", lines, cache)

    def _whole(self) -> str:
        """Everything is reduced: partial results of chunks, then one more step."""
        plan = schedule(self.program, ())
        item, size = plan.passes[0], self.nest.reduced[-1].size
        chunks = -(-size // CHUNK)
        body = self._steps(item.computes, LanePosition())
        body += [self._into_chunk(index) for index in item.reduces]
        lines = [
            *self._pointers((), ()),
            *self._row_steps(plan.rows_before),
            *(f"std::vector<float> part{index}({chunks});" for index in item.reduces),
            "#pragma omp parallel for schedule(static) num_threads(threads) if(threads > 1)",
            f"for (int64_t task = 0; task < {chunks}; ++task) {{",
            f"    const int64_t start = task * {CHUNK};",
            *self._chunk(size, item.reduces, body),
            *(f"    part{index}[task] = {self._across(index, 'b')};" for index in item.reduces),
            "}",
        ]
        for index in item.reduces:
            name = self._name_of(index)
            if name == "sum":
                combine = f"total{index} += part;"
            else:
                combine = f"if (std::isnan(part) || part {_sign(name)} total{index}) total{index} = part;"
            lines += [
                f"double total{index} = {self.neutral[name]};",
                f"for (const float part : part{index}) {combine}",
                f"const V v{index}(static_cast<float>(total{index}));",
            ]
        lines += [*self._row_steps(item.rows_after), *self._row_outputs()]
        return "\n".join(lines)


def _indent(lines: Sequence[str], levels: int = 1) -> list[str]:
    return ["    " * levels + line for line in lines]


def _lane_loop(body: Sequence[str]) -> list[str]:
    """From `start` to `stop`, as many lanes at once as a vector has."""
    return [
        "auto body = [&](int64_t j, int64_t n) __attribute__((always_inline)) {",
        *_indent(body),
        "};",
        "int64_t j = start;",
        "for (; j + WIDTH <= stop; j += WIDTH) body(j, WIDTH);",
        "if (j < stop) body(j, stop - j);",
    ]


def _sign(name: str) -> str:
    return {"sum": "+", "max": ">", "min": "<"}[name]


def _accumulate(name: str, into: str, item: str) -> str:
    if name == "sum":
        return f"{into} = {into} + {item};"
    return f"{into} = at::vec::{'maximum' if name == 'max' else 'minimum'}({into}, {item});"
