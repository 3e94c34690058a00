"""Shortens candidates so that a small model can learn to write them: cuts them to what differs from the reference, and
writes a CUDA graph that fits into an answer. The result is judged like any other.
"""

from __future__ import annotations

import ast
import textwrap

from kernelwright.records import Task
from kernelwright.rewrites.emit import reference_source


def shortened(task: Task, source: str) -> str:
    """The part of a candidate beyond its reference, without docstrings and without guards that fall back to the reference.

    Raises:
        SyntaxError: it is not Python.
    """
    known = {ast.dump(node) for node in ast.parse(reference_source(task.source)).body}
    known.add(ast.dump(ast.parse("import torch").body[0]))
    known.add(ast.dump(ast.parse("from torch.nn import functional as F").body[0]))
    tree = ast.parse(source)
    kept: list[ast.stmt] = []
    for node in tree.body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if docstring or future or ast.dump(node) in known:
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef):
                part.body = [line for line in part.body if not _is_docstring(line)] or [ast.Pass()]
        kept.append(_plain_class(node) if isinstance(node, ast.ClassDef) else node)
    text = "\n\n\n".join(ast.unparse(node) for node in kept) + "\n"
    # A name that the reference does not import must come with the answer.
    unused = "F." not in text.replace("import torch.nn.functional as F", "")
    return text.replace("import torch.nn.functional as F\n\n\n", "") if unused else text


def _plain_class(node: ast.ClassDef) -> ast.ClassDef:
    body: list[ast.stmt] = []
    for item in node.body:
        if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant):
            continue
        if isinstance(item, ast.FunctionDef):
            item.body = [line for line in item.body if not _is_guard(line)]
            if item.name == "__init__" and all(_only_traced(line) for line in item.body):
                continue
        body.append(item)
    node.body = body or [ast.Pass()]
    return node


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_guard(node: ast.stmt) -> bool:
    """`if not (...): return super().forward(...)`: the built-in policy's fall-back for inputs it was not written for."""
    if not isinstance(node, ast.If) or node.orelse or len(node.body) != 1 or not isinstance(node.body[0], ast.Return):
        return False
    negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
    return negated and ast.unparse(node.body[0]).startswith("return super().forward(")


def _only_traced(node: ast.stmt) -> bool:
    text = ast.unparse(node)
    return text.startswith("super().__init__(*args") or text.startswith("self._is_as_traced =")


def copied_forward(task: Task) -> str | None:
    """`ModelNew` with the reference's own `forward`: right, and no faster. None when `Model` has none of its own."""
    for node in ast.parse(task.source).body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "forward":
                    item.body = [line for line in item.body if not _is_docstring(line)] or [ast.Pass()]
                    item.args.args = [ast.arg(argument.arg) for argument in item.args.args]
                    item.returns = None
                    method = textwrap.indent(ast.unparse(ast.fix_missing_locations(item)), "    ")
                    return f"class ModelNew(Model):\n{method}\n".replace("super().", "super(Model, self).")
    return None


def graphed(code: str) -> str | None:
    """The same answer replayed from a CUDA graph; None when it has no `ModelNew.forward` of its own.

    The graph reads parameters where they are, so new weights count; inputs are copied in, outputs are copied out; buffers
    that warming up changed are put back.
    """
    tree = ast.parse(code)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "ModelNew":
            forwards = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "forward"]
            if len(forwards) == 1:
                forwards[0].name = "compute"
                text = ast.unparse(tree).replace("super().forward(", "super(ModelNew, self).forward(")
                return text + "\n" + GRAPH_FORWARD
    return None


GRAPH_FORWARD = """
    def forward(self, *inputs):
        key = (self.training, *((t.shape, t.stride()) for t in inputs))
        graphs = self.__dict__.setdefault("graphs", {})
        if key not in graphs:
            saved = [t.clone() for t in self.buffers()]
            static = [t.clone() for t in inputs]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.compute(*static)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = self.compute(*static)
            for t, value in zip(self.buffers(), saved):
                t.copy_(value)
            graphs[key] = graph, static, output
        graph, static, output = graphs[key]
        for old, new in zip(static, inputs):
            old.copy_(new)
        graph.replay()
        return output.clone()
"""
