"""Prints norms and softmax of long rows as kernels that read each row once: chunks wait for one another's partial results.

Chunks are given out in the order in which programs start. So those of the first unfinished row all run, or have run, where
a device takes as many programs at a time as a row has chunks.
"""

from __future__ import annotations

from typing import ClassVar

from kernelwright.rewrites.fusion.nest import Nest, Pass, evaluated_again, points
from kernelwright.rewrites.fusion.triton import LARGEST_TILE, TritonKernel, power_of_two

ONE_READ = "one-read-rows"
"""Technique: chunks of long rows stay in registers until the whole row's reductions are known."""
CHUNK = 8192
"""Elements of a chunk: 32 for each of 256 threads."""
MOST_CHUNKS = 64
"""Chunks of a row: two such kernels at once fit on an H100 or H200 with one program on each of 132 multiprocessors."""
LEAST_POINTS = 1 << 25
"""Points below which the L2 cache of 50 MB saves the second read as well."""


def reads_once(nest: Nest) -> bool:
    """Whether rows are too long for a tile, are many, and come from memory again where a kernel reads them twice."""
    rows, columns = points(nest.outer), points(nest.reduced)
    chunks = -(-columns // CHUNK)
    return columns > LARGEST_TILE and chunks <= MOST_CHUNKS and rows * columns >= LEAST_POINTS


class OneReadKernel(TritonKernel):
    """A Triton kernel of one program for each chunk of a row, and its launcher."""

    requires: ClassVar = (f"torch.cuda.get_device_properties(None).multi_processor_count >= {2 * MOST_CHUNKS}",)

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of what it does beyond fusing operators."""
        return (ONE_READ,)

    def _printed(self) -> str:
        at, rows = self._at_points(), points(self.nest.outer)
        columns, passes = points(self.nest.reduced), self.plan.passes
        parts = [f"part{index}" for item in passes for index in item.reduces]
        chunks, padded = -(-columns // CHUNK), power_of_two(-(-columns // CHUNK))
        body = [
            "ticket = tl.atomic_add(state, 1)",
            f"row = (ticket // {chunks}).to({self._index_type()})",
            f"chunk = ticket % {chunks}",
            *self._split(self.nest.outer, self._numbered("i", self.nest.outer), "row"),
            f"column = chunk * {CHUNK} + tl.arange(0, {CHUNK})",
            f"inside = column < {columns}",
            f"here = tl.minimum({columns} - chunk * {CHUNK}, {CHUNK}).to(tl.float32)",
            f"others = tl.arange(0, {padded})",
            *self._split(self.nest.reduced, self._numbered("r", self.nest.reduced), "column"),
            *self._row_steps(self.plan.rows_before),
        ]
        held = f"tl.minimum(tl.maximum({columns} - others * {CHUNK}, 0), {CHUNK})"
        done: set[int] = set()
        for number, item in enumerate(passes):
            needed = [index for index in evaluated_again(self.program, passes, number) if index not in done]
            body += self._steps(needed, at)
            done |= set(needed)
            if item.reduces:
                body += self._exchanged(number, item, rows, chunks)
                body += [*self._combined(item, held), *self._row_steps(item.rows_after)]
        body += [self._store(place, at, "inside") for place, _ in self.full_stores]
        body += [self._store(place, self._at_rows(), "chunk == 0") for place, _ in self.row_stores]
        launch, passed = f"_{self.__name__}_launch", sum(bool(item.reduces) for item in passes)
        lines = [f'KNOBS_{self.__name__.upper()} = {{"warps": (8, 16)}}', "", ""]
        lines += self._definition("kernel", [*self.inputs, *parts, "state", *self.outputs], body)
        warps = f'KNOBS_{self.__name__.upper()}["warps"][0]'
        lines += [f"{launch} = _Launch(_{self.__name__}_kernel, {rows * chunks}, {warps})", "", ""]

        given = ", ".join([*self.given_names, *parts, "state", *self.written])
        state = f"state = x0.new_zeros([{1 + passed * rows}], dtype=torch.int32)"
        return "\n".join([*lines, *self._launcher([*self._parts(str(rows * chunks)), state, f"{launch}({given})"])])

    def _exchanged(self, number: int, item: Pass, rows: int, chunks: int) -> list[str]:
        """This chunk's partial results of a pass are stored; once all chunks' are, they are read as `a{index}`."""
        lines = []
        for index in sorted(item.reduces, key=lambda one: one in self.pairs):
            source = self.pairs.get(index, index)
            given = self._reduced(source)
            if source == index:
                operand = f"tl.where(inside, {given}, {self._neutral(index)})"
                lines.append(self._whole_tile(index, operand))
            elif self._name_of(source) == "max":
                lines.append(f"centre = tl.where(v{source} == float('-inf'), 0.0, v{source})")
                lines.append(f"v{index} = tl.sum(tl.where(inside, tl.exp({given} - centre), 0.0), axis=0)")
            else:
                lines.append(f"distance = tl.where(inside, {given} - v{source} / here, 0.0)")
                lines.append(f"v{index} = tl.sum(distance * distance, axis=0)")
        lines += [f"tl.store(part{index} + row * {chunks} + chunk, v{index})" for index in item.reduces]
        lines += [
            f"arrived = tl.atomic_add(state + {1 + number * rows} + row, 1) + 1",
            f"while arrived < {chunks}:",
            f"    arrived = tl.atomic_add(state + {1 + number * rows} + row, 0)",
        ]
        for index in item.reduces:
            # What other programs have stored is not in this multiprocessor's cache.
            neutral = "0.0" if index in self.pairs else self._neutral(index)
            place = f"part{index} + row * {chunks} + others, mask=others < {chunks}, other={neutral}, cache_modifier='.cg'"
            lines.append(f"a{index} = tl.load({place})")
        return lines
