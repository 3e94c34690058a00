"""What the scripts of this folder share: prepared modules, their kernels compiled without a GPU, and times of a CUDA graph."""
import importlib.util, os, re
MODS = os.path.dirname(os.path.abspath(__file__)) + "/mods/"
def load(p):
    s = importlib.util.spec_from_file_location(re.sub(r"\W", "_", p), p); m = importlib.util.module_from_spec(s); s.loader.exec_module(m); return m
def name_of(source):
    """The kernel that takes `pixels`."""
    return re.search(r"def _(\w+)_kernel\([^)]*pixels", source)[1]
def knobs_of(source):
    """Its name, and the line of its knobs with their values."""
    name = name_of(source); line = re.search(rf"^KNOBS_{name.upper()} = .*$", source, re.M)[0]
    return name, line, eval(line.partition(" = ")[2])
def with_knobs(source, **chosen):
    """The module with one choice of each of these knobs."""
    name, line, knobs = knobs_of(source)
    return source.replace(line, f"KNOBS_{name.upper()} = {dict(knobs, **{k: (v,) for k, v in chosen.items()})!r}")
def compiled(path):
    from triton.compiler import ASTSource
    from triton.backends.compiler import GPUTarget
    import triton
    try:
        m = load(path); name = name_of(open(path).read())
        launch = getattr(m, f"_{name}_launch")[True]; k = launch.kernel; names = k.arg_names; n = len(names) - len(launch.constants)
        const = dict(zip(names[n:], launch.constants)); kinds = {"pixels": "*fp16", "filters": "*fp16", "pixel_largest": "*i32", "filter_largest": "*i32"}
        src = ASTSource(k, {a: ("constexpr" if a in const else kinds.get(a, "*fp32")) for a in names}, {(names.index(a),): v for a, v in const.items()}, {(i,): [["tt.divisibility", 16]] for i in range(n)})
        triton.compile(src, target=GPUTarget("cuda", 90, 32), options=dict(launch.options)); return path, None
    except Exception as e: return path, repr(e)[:300]
def graph_us(f, n=10):
    import torch
    f(); torch.cuda.synchronize()
    s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s): f()
    torch.cuda.current_stream().wait_stream(s)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(n): f()
    g.replay(); torch.cuda.synchronize(); ts = []
    for _ in range(5):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 1e3 / n)
    return round(sorted(ts)[2], 1)
