"""Tokens per second of a model in this process: the sampler of `kernelwright.models.sampler` and transformers' own ways.

    python benchmarks/local_model_throughput.py RUN_DIR                        random weights in the shape of Qwen2.5 0.5B
    python benchmarks/local_model_throughput.py RUN_DIR --model FOLDER_OR_GGUF  real ones
    python benchmarks/local_model_throughput.py RUN_DIR --shape tiny            on a CPU, to see that it runs

Each way runs in a process of its own, so that one that fails or leaves memory behind does not touch the next. All sample
from the same prompts with temperature 1. `fixed`: every answer has the same length, nothing stops early. `ragged`: answers
end by themselves after a quarter of the limit on average; the tokens of answers count, not those that a finished one makes
others wait for. Loading and warming up are not timed; recording CUDA graphs is, where a way does it at each call. The most
telling ways come first, for the whole may be cut at `--total-s`. Writes `throughput.jsonl` and `environment.json`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kernelwright.models.chat import Sampling
from kernelwright.models.local import LocalModel, LocalSettings
from kernelwright.models.pretrained import Weights, load_pretrained
from kernelwright.records import RunDirectory, capture_environment

SHAPES: dict[str, dict[str, Any]] = {
    # https://huggingface.co/Qwen/Qwen2.5-Coder-0.5B-Instruct, config.json
    "qwen2.5-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}


def main() -> None:
    """Run every way in a process of its own and print what each gave."""
    options = parsed()
    if options.way:
        print(json.dumps(measured(options)))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = RunDirectory(options.run)
    run.write_json("environment.json", capture_environment(device))
    run.write_json(
        "config.json", {"kind": "local-model-throughput", **{key: str(value) for key, value in vars(options).items()}}
    )
    if device == "cpu":
        print("NO GPU: these are rates of this CPU and say nothing about a GPU.")
    print(f"{'way':22} {'work':7} {'tokens/s':>10} {'tokens':>9} {'seconds':>8} {'memory GiB':>10}")
    deadline_s = time.monotonic() + options.total_s
    for way, work in [way.split("/") for way in options.ways or WORTH_MEASURING[device]]:
        limit_s = min(options.limit_s, deadline_s - time.monotonic())
        found = in_a_process(options, way, work, limit_s)
        with (options.run / "throughput.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
        if "error" in found:
            print(f"{way:22} {work:7} {found['error']}", flush=True)
            continue
        print(
            f"{way:22} {work:7} {found['tokens_per_s']:10,.0f} {found['tokens']:9,} {found['elapsed_s']:8.2f} "
            f"{found['peak_memory_gib'] or 0:10.1f}",
            flush=True,
        )


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", help="folder, hub name or GGUF file; without it, random weights")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--count", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument(
        "--measure-s", type=float, default=20, help="ways that work batch by batch start no batch after that"
    )
    parser.add_argument("--limit-s", type=float, default=120, help="for one way, with loading")
    parser.add_argument("--total-s", type=float, default=560, help="for everything")
    parser.add_argument("--ways", nargs="*", help=f"some of: {' '.join(WORTH_MEASURING['cuda'])}")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_a_process(options: argparse.Namespace, way: str, work: str, limit_s: float) -> dict[str, Any]:
    """What a fresh process finds, or why it found nothing."""
    command = [sys.executable, __file__, str(options.run), "--way", way, "--work", work, "--shape", options.shape]
    for name in ("prompts", "count", "prompt_tokens", "max_tokens", "measure_s"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if options.model:
        command += ["--model", options.model]
    about = {"way": way, "work": work}
    if limit_s <= 0:
        return about | {"error": "not measured: no time was left"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return about | {"error": f"not done within {limit_s:.0f} s"}
    if done.returncode:
        return about | {"error": f"failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1][:300]}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Load, warm up, and run with a clock."""
    way, _, batch = options.way.partition(":")
    model, tokenizer = loaded(options)
    # Tokens end answers by chance: with random weights each token is about as likely as any other.
    ends = ragged_ends(model, options) if options.work == "ragged" else ()
    prompts = random_prompts(model, options)
    work = WAYS[way](model, tokenizer, options.count, int(batch), ends)
    if way == "generate-static":
        # Compiled for these sizes and no others.
        next(work(prompts, options.max_tokens))
    else:
        next(work(prompts[:4], min(32, options.max_tokens)))
    synchronized(model)
    tokens, start_s = 0, time.perf_counter()
    for part in work(prompts, options.max_tokens):
        tokens += part
        if time.perf_counter() - start_s > options.measure_s:
            break
    synchronized(model)
    elapsed_s = time.perf_counter() - start_s
    on_gpu = model.device.type == "cuda"
    return {
        "way": options.way,
        "work": options.work,
        "model": options.model or f"random {options.shape}",
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "prompts": options.prompts,
        "count": options.count,
        "prompt_tokens": options.prompt_tokens,
        "max_tokens": options.max_tokens,
        "tokens": tokens,
        "elapsed_s": elapsed_s,
        "tokens_per_s": tokens / elapsed_s,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }


def loaded(options: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer; with random weights, a tokenizer that is there for form's sake."""
    if options.model:
        return load_pretrained(Weights(path=options.model))
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPES[options.shape])).eval()
    model.generation_config.eos_token_id = None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="x")))
    return model.to(torch.bfloat16 if device.type == "cuda" else torch.float32), tokenizer


def random_prompts(model: Any, options: argparse.Namespace) -> list[list[int]]:
    """Prompts of unequal length, from half of `prompt_tokens` to all of it."""
    noise = torch.Generator().manual_seed(1)
    prompts = []
    for place in range(options.prompts):
        length = options.prompt_tokens // 2 + (place * options.prompt_tokens // 2) // options.prompts + 1
        prompts.append(torch.randint(0, min(model.config.vocab_size, 50_000), (length,), generator=noise).tolist())
    return prompts


def ragged_ends(model: Any, options: argparse.Namespace) -> tuple[int, ...]:
    """So many tokens that an answer ends after a quarter of its limit on average."""
    share = 4 / options.max_tokens
    return tuple(range(max(1, round(model.config.vocab_size * share))))


def synchronized(model: Any) -> None:
    """Wait for the GPU."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()


Work = Callable[[list[list[int]], int], Iterator[int]]
"""Samples answers to prompts, at most so many tokens each; says part by part how many tokens the answers have."""


def with_slots(model: Any, tokenizer: Any, count: int, batch: int, ends: tuple[int, ...], cuda_graphs: bool = True) -> Work:
    """This package's sampler."""
    settings = LocalSettings(batch_size=batch, cuda_graphs=cuda_graphs)
    local = LocalModel(model, tokenizer, settings=settings)
    local._stop_ids = ends

    def work(prompts: list[list[int]], max_tokens: int) -> Iterator[int]:
        found = local.sample_ids(prompts, count=count, sampling=Sampling(max_tokens=max_tokens))
        yield sum(answer.steps for _, _, answer in found if answer is not None)

    return work


def without_graphs(*given: Any) -> Work:
    """The same, every kernel launched from Python."""
    return with_slots(*given, cuda_graphs=False)


def with_generate(
    model: Any, tokenizer: Any, count: int, batch: int, ends: tuple[int, ...], cache: str | None = None
) -> Work:
    """`generate`, prompts sorted by length and padded on the left, answers of a prompt side by side."""

    def work(prompts: list[list[int]], max_tokens: int) -> Iterator[int]:
        # The longest first, as the others do, for what is not done in time would be the slowest part.
        rows = [prompt for prompt in sorted(prompts, key=len, reverse=True) for _ in range(count)]
        for start in range(0, len(rows), batch):
            part = rows[start : start + batch]
            width = max(map(len, rows)) if cache else max(map(len, part))
            ids = torch.zeros(len(part), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(part):
                ids[row, -len(prompt) :] = torch.tensor(prompt)
                mask[row, -len(prompt) :] = 1
            answers = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                do_sample=True,
                top_k=0,
                max_new_tokens=max_tokens,
                eos_token_id=list(ends) or None,
                pad_token_id=0,
                cache_implementation=cache,
            )
            yield answer_tokens(answers[:, width:], ends)

    return work


def answer_tokens(answers: torch.Tensor, ends: tuple[int, ...]) -> int:
    """Tokens up to and with the one that ends each row."""
    ended = (
        torch.isin(answers, torch.tensor(ends, device=answers.device))
        if ends
        else torch.zeros_like(answers, dtype=torch.bool)
    )
    return int((ended.cumsum(-1) - ended.long() == 0).sum())


def with_static_cache(*given: Any) -> Work:
    """`generate` over a static cache, which transformers compiles."""
    return with_generate(*given, cache="static")


def with_generate_batch(model: Any, tokenizer: Any, count: int, batch: int, ends: tuple[int, ...]) -> Work:
    """transformers' continuous batching, with the attention it chooses."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    def work(prompts: list[list[int]], max_tokens: int) -> Iterator[int]:
        rows = [prompt for prompt in prompts for _ in range(count)]
        config = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=max_tokens, eos_token_id=list(ends) or -1, pad_token_id=0
        )
        found = model.generate_batch(
            rows,
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=batch),
        )
        if len(found) < len(rows):
            raise RuntimeError(f"{len(rows) - len(found)} of {len(rows)} answers are missing")
        yield sum(len(answer.generated_tokens) for answer in found.values())

    return work


WORTH_MEASURING = {
    "cuda": [
        "slots:512/fixed",
        "generate:64/fixed",
        "slots:512/ragged",
        "generate:512/fixed",
        "slots:128/fixed",
        "slots:1024/fixed",
        "slots-no-graphs:512/fixed",
        "generate:512/ragged",
        "generate_batch:512/fixed",
        "generate-static:128/fixed",
    ],
    "cpu": ["slots:16/fixed", "slots:16/ragged", "generate:16/fixed", "generate:16/ragged"],
}
"""Way, batch and work; the most telling first."""

WAYS: dict[str, Callable[..., Work]] = {
    "slots": with_slots,
    "slots-no-graphs": without_graphs,
    "generate": with_generate,
    "generate-static": with_static_cache,
    "generate_batch": with_generate_batch,
}


if __name__ == "__main__":
    main()
