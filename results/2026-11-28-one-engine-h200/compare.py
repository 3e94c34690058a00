"""Runs `bench builtin` and ten of CUDA-L1's tasks by two trees on one machine: on two GPUs at once, or one after the other.

    GPUS=1 python3 compare.py WORK MINUTES_EACH RELEASE.json    # the trees are WORK/before and WORK/after
"""
import json, os, subprocess, sys, tarfile, time, pathlib, threading

work, minutes, release = pathlib.Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
ONLY = "level1/35,level1/47,level1/64,level1/82,level2/32,level2/61,level2/89,level2/99,level3/22,level3/6"  # random.Random(50): 4, 4 and 2 of levels 1, 2, 3
SUITES = {"builtin": ["builtin"], "cuda-l1": ["cuda-l1", "--path", release, "--only", ONLY]}
gpus = int(os.environ.get("GPUS", "2"))
cores = sorted(os.sched_getaffinity(0))
half = len(cores) // gpus

def go(tree, suite, gpu):
    out = work / "runs" / f"{suite}-{tree}"
    out.parent.mkdir(exist_ok=True, parents=True)
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES=str(gpu), PYTHONPATH=f"{work / tree / 'src'}:{os.environ.get('PYTHONPATH','')}")
    command = [sys.executable, "-m", "kernelwright", "bench", *SUITES[suite], "--policy", "builtin", "--baselines", os.environ.get("BASELINES", "eager,compile,cudagraph"), "--minutes", str(minutes),
               "--device", os.environ.get("DEVICE", "cuda"), "--out", str(out), "--json"]
    mine = cores[gpu * half : (gpu + 1) * half]
    began = time.time()
    with open(f"{out}.json", "wb") as stdout, open(f"{out}.log", "wb") as stderr:
        process = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, cwd=work / tree, start_new_session=True, preexec_fn=lambda: os.sched_setaffinity(0, mine))
        try:
            status = process.wait(minutes * 60 + 60)
        except subprocess.TimeoutExpired:
            import signal
            os.killpg(process.pid, signal.SIGKILL); status = "killed"
    with open(work / "runs" / "times.jsonl", "a") as log:
        log.write(json.dumps({"tree": tree, "suite": suite, "gpu": gpu, "cores": len(mine), "minutes": minutes, "wall_s": round(time.time() - began, 1), "status": status}) + "\n")

def both(*jobs):
    threads = [threading.Thread(target=go, args=job) for job in jobs]
    for t in threads: t.start()
    for t in threads: t.join()

if gpus == 2:
    both(("before", "builtin", 0), ("after", "builtin", 1))
    both(("after", "cuda-l1", 0), ("before", "cuda-l1", 1))
else:
    for job in (("before", "builtin", 0), ("after", "builtin", 0), ("after", "cuda-l1", 0), ("before", "cuda-l1", 0)): go(*job)
(work / "done").write_text("done")
