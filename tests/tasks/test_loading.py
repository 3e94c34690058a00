"""Reading a task and bringing it to life; every way in which it can be broken."""

from __future__ import annotations

import inspect
import traceback

import pytest
import torch

from kernelwright.errors import TaskError
from kernelwright.records import Task
from kernelwright.tasks import bring_to_life, load_task, read_source, seed_generators, task_from_file
from kernelwright.tasks.loading import unfit_state
from kernelwright.tasks.source import check_task_source

CPU = torch.device("cpu")

GOOD = """
import torch

class Model(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = torch.nn.Linear(size, size)

    def forward(self, x, extra):
        return self.linear(x) + extra["y"][0]

def get_inputs():
    return [torch.randn(2, 3), {"y": [torch.randn(3), 2], "z": (torch.ones(1, requires_grad=True),)}]

def get_init_inputs():
    return [3]
"""


def live(source=GOOD):
    return bring_to_life(Task(id="t", source=source))


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [tensor for part in parts for tensor in flat(part)]


# --- files ----------------------------------------------------------------------------------------


def test_a_task_from_a_file(tmp_path):
    path = tmp_path / "my_task.py"
    path.write_text(GOOD)
    for task in (load_task(str(path)), task_from_file(path)):
        assert (task.id, task.source, task.origin) == ("my_task", GOOD, str(path))


def test_a_task_by_its_id():
    task = load_task("diag_matmul")
    assert task.id.endswith("diag_matmul")
    assert bring_to_life(task).inputs(0, CPU)


def test_an_unknown_id_is_a_task_error():
    with pytest.raises(TaskError, match="no_such_task"):
        load_task("no_such_task")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b" \n\t\n", "empty"),
        (b"\xff\xfe\x00junk", "not UTF-8"),
        (b"x = 1\0", "null bytes"),
        (b"def (", "not valid Python in line 1"),
        (b"(" * 3000 + b")" * 3000, "not valid Python"),
        (b"x = 1", "no Model, get_inputs, get_init_inputs"),
        (GOOD.replace("get_init_inputs", "other").encode(), "no get_init_inputs"),
    ],
)
def test_a_file_that_is_no_task_says_what_is_wrong(tmp_path, data, words):
    path = tmp_path / "task.py"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(TaskError, match=words) as caught:
        load_task(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    (tmp_path / "plain.py").write_text(GOOD)
    (tmp_path / "marked.py").write_text(GOOD, encoding="utf-8-sig")
    assert load_task(str(tmp_path / "marked.py")).source == load_task(str(tmp_path / "plain.py")).source


def test_a_file_that_is_no_source_by_its_size_is_not_read(tmp_path):
    path = tmp_path / "task.py"
    with path.open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(TaskError, match="below 16 MiB"):
        load_task(str(path))


def test_a_directory_is_no_task(tmp_path):
    with pytest.raises(TaskError, match="directory"):
        load_task(str(tmp_path))
    with pytest.raises(TaskError, match="a candidate"):
        read_source(tmp_path, "a candidate")


def test_a_file_that_cannot_be_read_says_why(tmp_path, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "x.py").touch()
    monkeypatch.setattr(type(tmp_path), "read_bytes", denied)
    with pytest.raises(TaskError, match="Permission denied"):
        read_source(tmp_path / "x.py", "a task")


@pytest.mark.parametrize(
    "source",
    [
        "from x import Model, get_inputs\nimport y as get_init_inputs",
        "Model = get_inputs = get_init_inputs = None",
        "if True:\n    class Model: pass\n    def get_inputs(): pass\n    def get_init_inputs(): pass",
    ],
)
def test_the_names_may_come_from_anywhere(source):
    check_task_source(source, "here")


def test_an_unpacked_name_does_not_count():
    with pytest.raises(TaskError, match="found no Model"):
        check_task_source("(Model, x), y.z = 1\ndef get_inputs(): pass\ndef get_init_inputs(): pass", "here")


# --- modules --------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_inputs_and_another_one_others():
    task = live()
    first, again, other = (flat(task.inputs(seed, CPU)) for seed in (1, 1, 2))
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])


def test_drawing_leaves_the_generator_of_the_process_alone():
    task = live()
    before = torch.random.get_rng_state()
    task.inputs(5, CPU)
    task.model(5, CPU)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_inputs_carry_no_gradient_and_keep_their_structure():
    inputs = live().inputs(1, CPU)
    assert not any(tensor.requires_grad for tensor in flat(inputs))
    assert inputs[1]["y"][1] == 2
    assert isinstance(inputs[1]["z"], tuple)


def test_the_same_seed_builds_the_same_model():
    task = live()
    weights = [task.model(seed, CPU).linear.weight for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert task.init_inputs == [3]


def test_the_source_of_a_live_model_can_be_found():
    assert "self.linear(x)" in inspect.getsource(live().module.Model.forward)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("import torch\n", "import torch, no_such_module\n", "the module of t to run.*no_such_module"),
        ("return [3]", "return 3", "list from get_init_inputs.*found int"),
        ("return [3]", "raise ValueError('here')", "get_init_inputs.*here"),
        ("return [3]", "raise ValueError", "get_init_inputs.*ValueError"),
    ],
)
def test_a_module_that_does_not_come_to_life_is_a_task_error(old, new, words):
    with pytest.raises(TaskError, match=words):
        live(GOOD.replace(old, new))


def test_inputs_must_be_a_list_and_models_modules():
    with pytest.raises(TaskError, match=r"get_inputs.*found int"):
        live(GOOD.replace("    return [torch.randn(2, 3)", "    return 3 #")).inputs(0, CPU)
    with pytest.raises(TaskError, match=r"get_inputs.*ZeroDivisionError"):
        live(GOOD.replace("    return [torch.randn(2, 3)", "    1 / 0\n    return [0")).inputs(0, CPU)
    with pytest.raises(TaskError, match=r"Model\(\) of t .*TypeError.*'size'\. Have get_init_inputs\(\) return a list"):
        live(GOOD.replace("return [3]", "return []")).model(0, CPU)
    with pytest.raises(TaskError, match=r"Model\('a'\) of t .*, in line 7 of t\. Have get_init_inputs"):
        live(GOOD.replace("return [3]", "return ['a']")).model(0, CPU)
    plain = GOOD.replace("(torch.nn.Module)", "").replace("super().__init__()", "pass")
    with pytest.raises(TaskError, match=r"torch\.nn\.Module from Model.*found Model"):
        live(plain).model(0, CPU)


def test_a_tuple_is_as_good_as_a_list():
    source = GOOD.replace("return [3]", "return (3,)")
    assert live(source).init_inputs == [3]


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        ("torch.OutOfMemoryError('full')", torch.OutOfMemoryError),
        ("torch.AcceleratorError('CUDA error: out of memory')", torch.AcceleratorError),
        ("torch.AcceleratorError('CUDA error: misaligned address')", TaskError),
        ("RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate')", RuntimeError),
        ("RuntimeError('out of memory')", TaskError),
    ],
)
def test_a_full_device_is_not_the_tasks_fault(raised, kind):
    source = "import torch\nclass Model(torch.nn.Module): pass\ndef get_init_inputs(): return []\n"
    live = bring_to_life(Task(id="t", source=f"{source}def get_inputs(): raise {raised}\n"))
    with pytest.raises(kind):
        live.inputs(0, torch.device("cpu"))


def test_seeding_is_that_of_torch_and_writes_down_no_stack(monkeypatch):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        wanted = torch.rand(3)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setattr(traceback, "format_stack", lambda *arguments: pytest.fail("a stack was written down"))
            seed_generators(7)
        assert torch.equal(torch.rand(3), wanted)


def quantised():
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(4, 4)))
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def keeping(value, *, parameter=False):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    if parameter:
        model[0].register_parameter("kept", torch.nn.Parameter(value, requires_grad=False))
    else:
        model[0].register_buffer("kept", value)
    return model


STATES = {
    "eight bits": (lambda: keeping(torch.ones(4).to(torch.float8_e4m3fn)), None),
    "a sparse buffer": (lambda: keeping(torch.eye(4).to_sparse_csr()), None),
    "weight norm": (lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4)), None),
    "a sparse parameter": (
        lambda: keeping(torch.eye(4).to_sparse(), parameter=True),
        "in `0.kept`, of a Linear, a sparse_coo Tensor of float32. Keep its content",
    ),
    "quantised layers": (
        quantised,
        "in `1.0._packed_params.dtype`, of a LinearPackedParams, packed weights of a quantised layer. Give the model",
    ),
    "a quantised buffer": (
        lambda: keeping(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)),
        "of qint8. Give the model as it was",
    ),
    "a strange type": (
        lambda: keeping(torch.ones(4, dtype=torch.complex32)),
        "a strided Tensor of complex32. Keep its",
    ),
    "no sizes yet": (
        lambda: torch.nn.LazyLinear(4),
        "in `weight`, of a LazyLinear, a UninitializedParameter without values",
    ),
    "expanded": (lambda: keeping(torch.ones(1, 4).expand(3, 4)), "an expanded tensor, into which nothing can be loaded"),
    "nested": (
        lambda: keeping(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
        "a jagged NestedTensor of float32. Keep its content",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", STATES)
def test_a_state_that_cannot_be_drawn_anew_is_named_with_its_part_and_what_to_do(what):
    made, words = STATES[what]
    found = unfit_state(made())
    assert (found is None) if words is None else (words in found), found


def test_a_task_without_values_is_a_task_error():
    lazy = live(GOOD.replace("torch.nn.Linear(size, size)", "torch.nn.LazyLinear(size)"))
    with pytest.raises(TaskError, match=r"LazyLinear, a UninitializedParameter without values. Call the model once"):
        lazy.model(0, CPU)
    with pytest.raises(TaskError, match="meta tensor"):
        live(GOOD.replace("torch.nn.Linear(size, size)", "torch.nn.Linear(size, size, device='meta')")).model(0, CPU)
    with pytest.raises(TaskError, match="meta tensor"):
        live(GOOD.replace("torch.randn(2, 3)", "torch.randn(2, 3, device='meta')")).inputs(0, CPU)
