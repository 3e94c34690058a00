"""Launch specs, the contents of tensors, and targets from files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kernelwright.errors import ConfigError, UsageError
from kernelwright.gpu.launch_spec import LaunchSpec, TensorArgument, plain_type, read_launch_file
from kernelwright.gpu.launcher import difference, initial_contents
from kernelwright.gpu.target import CORPUS, corpus_specs, load_target, save_target
from tests.gpu.fakes import SPEC


def tensor(**changes):
    return TensorArgument.model_validate({"name": "x", "dtype": "fp32", "shape": [1000], **changes})


def test_a_spec_comes_back_from_json():
    assert LaunchSpec.model_validate_json(SPEC.model_dump_json()) == SPEC


def test_the_signature_holds_what_a_launch_looks_like_and_not_what_it_runs_on(row_sum):
    assert row_sum.spec.signature == "row_sum(*fp32, *fp32, i32, i32) threads=128 shared=16"
    assert row_sum.spec.model_copy(update={"grid": (1, 1, 1)}).signature == row_sum.spec.signature


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grid": [0, 1, 1]}, "grid"),
        ({"deterministic": False}, "rtol or atol"),
        ({"arguments": []}, "nothing could be checked"),
        ({"input_sets": 0}, "input_sets"),
        ({"threads": 3}, "threads"),
        ({"architecture": 12345}, "architecture.*wanted one of 70, "),
        ({"source": "k.cu"}, "either `cubin` or `source`"),
        ({"block": [64, 64, 1]}, "1 to 1024 threads"),
        (
            {"arguments": [{"kind": "tensor", "name": "y", "dtype": "fp32", "shape": [64], "role": "output"}] * 2},
            "distinct argument names",
        ),
        (
            {"arguments": [{"kind": "tensor", "name": "y", "dtype": "fp32", "shape": [0], "role": "output"}]},
            "axes of 1 or more",
        ),
        ({"entrance": 1}, "did you mean"),
    ],
)
def test_an_impossible_spec_is_refused(changes, said, tmp_path):
    path = tmp_path / "launch.json"
    path.write_text(json.dumps({**SPEC.model_dump(mode="json"), "cubin": "k.cubin", **changes}))
    with pytest.raises(ConfigError, match=said) as refused:
        read_launch_file(path)
    assert str(refused.value).endswith(f" The file is {path}.")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [("launch.yaml", "", "toml or .json"), ("launch.json", "{", "JSON"), ("launch.json", "[]", "one JSON object")],
)
def test_an_unreadable_file_is_refused(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=said):
        read_launch_file(tmp_path / name)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64", "i8", "u8", "i16", "i32", "i64", "i1"])
@pytest.mark.parametrize("init", ["normal", "uniform", "integers", "zeros", "ones"])
def test_contents_have_the_tensors_size_and_depend_on_the_seed_alone(dtype, init):
    made = tensor(dtype=dtype, init=init, low=0, high=2)
    assert len(initial_contents(made, 1)) == made.size_bytes
    assert initial_contents(made, 1) == initial_contents(made, 1)
    if init == "normal" and dtype.startswith(("fp", "bf")):
        assert initial_contents(made, 1) != initial_contents(made, 2)
        assert initial_contents(made, 1) != initial_contents(made.model_copy(update={"name": "y"}), 1)


def test_distributions():
    values = np.frombuffer(initial_contents(tensor(scale=3.0), 0), np.float32)
    assert values.std() == pytest.approx(3.0, rel=0.1)
    values = np.frombuffer(initial_contents(tensor(init="uniform", low=2, high=4), 0), np.float32)
    assert 2 <= values.min() < 2.1 < 3.9 < values.max() < 4
    values = np.frombuffer(initial_contents(tensor(dtype="i64", init="integers", low=5, high=8), 0), np.int64)
    assert set(values) == {5, 6, 7}
    assert set(initial_contents(tensor(role="output"), 0)) == {0xFF}


def test_bf16_rounds_to_nearest_even():
    bits = np.frombuffer(initial_contents(tensor(dtype="bf16", init="ones"), 0), np.uint16)
    assert set(bits) == {0x3F80}
    torch = pytest.importorskip("torch")
    ours = np.frombuffer(initial_contents(tensor(dtype="bf16"), 7), np.int16)
    exact = np.frombuffer(initial_contents(tensor(dtype="fp32"), 7), np.float32).copy()
    assert (torch.from_numpy(exact).to(torch.bfloat16).view(torch.int16).numpy() == ours).all()


def test_outputs_are_compared_bit_by_bit_or_within_the_tolerance():
    values = np.linspace(1, 2, 64, dtype=np.float32)
    near = values * np.float32(1.001)
    assert difference(SPEC, [values.tobytes()], [values.tobytes()]) is None
    assert "bytes of y differ" in difference(SPEC, [values.tobytes()], [near.tobytes()])
    loose = SPEC.model_copy(update={"deterministic": False, "rtol": 1e-2})
    assert difference(loose, [values.tobytes()], [near.tobytes()]) is None
    assert "64 of 64 values" in difference(loose, [values.tobytes()], [(values * 2).tobytes()])
    poison = np.full(64, np.nan, np.float32)
    assert difference(loose, [values.tobytes()], [poison.tobytes()]) is not None


def test_a_target_comes_back_from_files(row_sum, tmp_path):
    path = save_target(row_sum, tmp_path)
    assert load_target(str(path), 80) == row_sum


@pytest.mark.parametrize(
    ("kind", "plain"),
    [("*kfp32", "*fp32"), ("*u1", "*i1"), ("u1", "i1"), ("f32", "fp32"), ("i64", "i64"), ("*bf16", "*bf16")],
)
def test_types_have_one_spelling(kind, plain):
    assert plain_type(kind) == plain


def test_every_kernel_of_the_corpus_has_a_launch_that_fits_its_parameters():
    specs = corpus_specs()
    assert set(specs) == set(CORPUS)
    for name, spec in specs.items():
        given = {argument.name for argument in spec.arguments} | set(spec.constants)
        assert given == set(spec.kernel.arg_names), name


SPEC_FILE = """
import triton
import triton.language as tl

from kernelwright.gpu.launch_spec import ScalarArgument, TensorArgument
from kernelwright.gpu.triton_spec import TritonSpec


@triton.jit
def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


ARGUMENTS = [
    TensorArgument(name="x_ptr", dtype="fp16", shape=(1000,)),
    TensorArgument(name="y_ptr", dtype="fp16", shape=(1000,), role="output"),
    ScalarArgument(name="n", value=1000),
]
SPECS = {
    "small": TritonSpec(copy, ARGUMENTS, (8,), {"BLOCK": 128}),
    "large": TritonSpec(copy, ARGUMENTS, (4,), {"BLOCK": 256}, num_warps=8, settings={"cold_l2": True}),
    "partial": TritonSpec(copy, ARGUMENTS[:2], (4,), {"BLOCK": 256}),
}
"""


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(SPEC_FILE)
    return path


def test_a_python_file_with_specs(spec_file):
    target = load_target(f"{spec_file}:large", 80)
    assert (target.architecture, target.spec.block, target.spec.cold_l2) == (80, (256, 1, 1), True)
    assert [argument.kind for argument in target.spec.arguments] == ["tensor", "tensor", "scalar", "null", "null"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("", "small, large, partial"), (":none", "small, large, partial"), (":partial", "for each of")],
)
def test_a_spec_that_is_not_there_or_not_whole(spec_file, name, said):
    with pytest.raises(UsageError, match=said):
        load_target(f"{spec_file}{name}", 80)


@pytest.mark.parametrize(
    ("text", "said"),
    [("1 / 0", "ZeroDivisionError"), ("raise SystemExit(0)", "SystemExit"), ("SPECS = []", "SPECS"), ("", "SPECS")],
)
def test_a_python_file_that_does_not_work(tmp_path, text, said):
    (tmp_path / "kernels.py").write_text(text)
    with pytest.raises(UsageError, match=said):
        load_target(str(tmp_path / "kernels.py"), 80)


def test_what_a_python_file_prints_is_not_among_the_result(spec_file, capsys):
    spec_file.write_text("print('loading')\n" + spec_file.read_text())
    load_target(f"{spec_file}:small", 80)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "loading\n")


def test_names_that_lead_nowhere(tmp_path):
    for name in (str(tmp_path / "none.py"), str(tmp_path / "none.json"), "corpus:none"):
        with pytest.raises(UsageError):
            load_target(name, 80)


def test_the_example_of_a_triton_kernel_is_a_target():
    from pathlib import Path

    target = load_target(str(Path(__file__).parents[2] / "examples" / "sass" / "bias_gelu.py"), 90)
    assert target.spec.signature == "bias_gelu(*fp16, *fp16, *fp16, i32) threads=128 shared=0"
    assert target.spec.grid == (2048, 4, 1)


def test_without_triton_the_corpus_says_what_is_missing(monkeypatch):
    from kernelwright.errors import CompilerMissingError
    from kernelwright.gpu import target

    def missing():
        raise ModuleNotFoundError("import of triton halted", name="triton")

    monkeypatch.setattr(target, "corpus_specs", missing)
    with pytest.raises(CompilerMissingError, match=r"wanted Triton to compile softmax.*kernelwright\[triton\]"):
        target.load_target("corpus:softmax", 90)

    def broken():
        raise ModuleNotFoundError("No module named 'nowhere'", name="nowhere")

    monkeypatch.setattr(target, "corpus_specs", broken)
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        target.load_target("corpus:softmax", 90)
