"""A model in this process: the same answers as transformers' own `generate`, in any batch, and what may go wrong."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernelwright.errors import ConfigError, PolicyError
from kernelwright.models import pretrained
from kernelwright.models import sampler as slots
from kernelwright.models.chat import Message, Sampling
from kernelwright.models.factory import chat_model
from kernelwright.models.local import LocalModel, LocalSettings
from kernelwright.models.pretrained import Weights, tiny_vocabulary
from tests.models.tiny_model import tiny_model, tiny_tokenizer
from tests.quick import exhaustive_but

TEXTS = ("hi", "a longer prompt with more words in it", "of middle length", "hi there")
PROMPTS = [[Message("user", text)] for text in TEXTS]


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture(autouse=True)
def small_strides(monkeypatch):
    """Short answers, too, cross the borders at which attention widens and finished answers are looked for."""
    monkeypatch.setattr(slots, "COLUMN_STEP", 32)
    monkeypatch.setattr(slots, "STEPS_BETWEEN_LOOKS", 4)


def sampler(model, *, batch_size: int | None = 3, template: bool = True, **options) -> LocalModel:
    tokenizer = tiny_tokenizer() if template else tiny_tokenizer(None)
    return LocalModel(model, tokenizer, settings=LocalSettings(batch_size=batch_size, **options))


def greedy(max_tokens: int = 40) -> Sampling:
    return Sampling(temperature=0, max_tokens=max_tokens)


def generated(model, ids: list[int], max_tokens: int = 40, **options) -> list[int]:
    """Tokens of transformers' own loop."""
    options = {"do_sample": False, "max_new_tokens": max_tokens, "pad_token_id": 0} | options
    return model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()


def sampled_ids(local: LocalModel, sampling: Sampling, count: int = 1) -> dict[tuple[int, int], list[int]]:
    prompts = [local.prompt_ids(prompt) for prompt in PROMPTS]
    return {
        (prompt, number): found.tokens
        for prompt, number, found in local.sample_ids(prompts, count=count, sampling=sampling)
        if found is not None
    }


@pytest.mark.parametrize("batch_size", exhaustive_but([1, 3, 12, None], 3))
def test_greedy_answers_are_those_of_generate_in_any_batch(model, batch_size):
    local = sampler(model, batch_size=batch_size)
    found = sampled_ids(local, greedy(), count=3)
    assert len(found) == 12
    expected = [generated(model, local.prompt_ids(prompt)) for prompt in PROMPTS]
    assert all(tokens == expected[prompt] for (prompt, _), tokens in found.items())


def test_answers_that_end_at_different_points_are_those_of_generate(model):
    local = sampler(model, batch_size=4)
    plain = sampled_ids(local, greedy(60))
    stops = {tokens[place] for (prompt, _), tokens in plain.items() for place in [7 + 13 * prompt]}
    local.stop_ids = tuple(stops)
    found = sampled_ids(local, greedy(60), count=3)
    whole = [generated(model, local.prompt_ids(prompt), 60, eos_token_id=sorted(stops)) for prompt in PROMPTS]
    expected = [tokens[:-1] if tokens[-1] in stops else tokens for tokens in whole]
    assert all(tokens == expected[prompt] for (prompt, _), tokens in found.items())
    assert len({len(tokens) for tokens in found.values()}) > 2, "every answer ended at the same point"


def test_slots_are_refilled_and_what_is_left_is_moved_together(model, monkeypatch):
    moved = []
    keep = slots.SlotCache.keep
    monkeypatch.setattr(slots.SlotCache, "keep", lambda self, kept: moved.append(kept.tolist()) or keep(self, kept))
    local = sampler(model)
    lengths = [5, 9, 60, 7, 3, 30, 12, 50, 4, 21]
    requests = [
        slots.Request(index, tuple(local.prompt_ids(PROMPTS[index % 4])), length) for index, length in enumerate(lengths)
    ]
    drawing = slots.Draw(0.0, 1.0, (), 0)
    step = slots.SlotSampler(model, slots=8, columns=128, draw=drawing, autocast=None, graphs=False)
    with slots.attention_of(model):
        found = {answer.index: answer.tokens for answer in step.run(requests)}
    for request in requests:
        assert found[request.index] == generated(model, list(request.prompt), request.max_tokens)
    assert any(kept != list(range(len(kept))) for kept in moved), "nothing changed its slot"


@pytest.mark.exhaustive
def test_a_model_whose_steps_cannot_be_recorded_is_sampled_without_graphs(model, monkeypatch, caplog):
    run = slots.SlotSampler.run

    def unrecordable(self, requests):
        for number, found in enumerate(run(self, requests)):
            if asked[-1] and number == 2:
                raise slots.GraphError("no recording")
            yield found

    made = slots.SlotSampler.__init__
    asked = []
    monkeypatch.setattr(
        slots.SlotSampler,
        "__init__",
        lambda self, *given, graphs, **rest: asked.append(graphs) or made(self, *given, graphs=False, **rest),
    )
    monkeypatch.setattr(slots.SlotSampler, "run", unrecordable)
    local = sampler(model, batch_size=4)
    found = sampled_ids(local, greedy(), count=3)
    assert len(found) == 12
    expected = [generated(model, local.prompt_ids(prompt)) for prompt in PROMPTS]
    assert all(tokens == expected[prompt] for (prompt, _), tokens in found.items())
    sampled_ids(local, greedy())
    assert asked == [True, False, False]
    assert "without CUDA graphs" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_greedy_answers_are_likely_ones_with_and_without_graphs(model, graphs, dtype):
    """Each token within rounding of the likeliest; and a second call finds nothing left over from the first."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = model.to("cuda", dtype)
    local = sampler(model, batch_size=8, cuda_graphs=graphs)
    slack = 1e-3 if dtype == torch.float32 else 0.5
    for _ in range(2):
        found = sampled_ids(local, greedy(60), count=3)
        for (prompt, _), tokens in found.items():
            ids = torch.tensor([local.prompt_ids(PROMPTS[prompt]) + tokens], device="cuda")
            with torch.no_grad():
                logits = model(ids).logits[0, -len(tokens) - 1 : -1].float()
            chosen = logits.gather(1, ids[0, -len(tokens) :, None])[:, 0]
            assert (logits.max(-1).values - chosen).max() < slack
        assert len(found) == 12


def test_a_prompt_is_computed_once_for_all_its_answers(model, monkeypatch):
    shapes = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **given: shapes.append(given["input_ids"].shape) or forward(**given))
    local = sampler(model, batch_size=8)
    sampled_ids(local, greedy(8), count=2)
    longest = max(len(local.prompt_ids(prompt)) for prompt in PROMPTS)
    assert [shape for shape in shapes if shape[1] > 1] == [(4, longest - 1)]


def test_long_prompts_are_computed_a_few_at_a_time(model, monkeypatch):
    monkeypatch.setattr(slots, "PREFILL_TOKENS", 70)
    expected = sampled_ids(sampler(model, batch_size=1), greedy(8))
    assert sampled_ids(sampler(model, batch_size=8), greedy(8)) == expected


def test_answers_stop_where_the_model_says_so(model):
    local = sampler(model)
    ids = local.prompt_ids(PROMPTS[0])
    plain = generated(model, ids)
    end = plain[5]
    model.generation_config.eos_token_id = [end]
    (answer,) = sampler(model).sample(PROMPTS[:1], count=1, sampling=greedy())[0]
    kept = plain[: plain.index(end)]
    assert answer.text == local.tokenizer.decode(kept, skip_special_tokens=True)
    assert (answer.finish_reason, answer.failure) == ("stop", None)
    assert answer.completion_tokens == len(kept) + 1
    assert answer.prompt_tokens == len(ids)


def test_the_end_of_a_turn_in_the_template_ends_an_answer(model):
    assert tiny_vocabulary().index("<|im_end|>") in sampler(model).stop_ids
    assert tiny_vocabulary().index("<|im_end|>") not in sampler(model, template=False).stop_ids
    assert tiny_vocabulary().index("<|endoftext|>") in sampler(model, template=False).stop_ids


@pytest.mark.parametrize("length", [1, 3, 4, 5, 17])
def test_answers_are_no_longer_than_asked(model, length):
    (answer,) = sampler(model).sample(PROMPTS[:1], count=1, sampling=greedy(length))[0]
    assert (answer.completion_tokens, answer.finish_reason) == (length, "length")


def test_a_prompt_may_use_up_the_window():
    model = tiny_model(max_position_embeddings=64)
    fits, full = sampler(model).sample([PROMPTS[0], [Message("user", "x" * 100)]], count=2, sampling=greedy(500))
    assert {answer.failure for answer in full} == {"prompt-too-long"}
    assert {answer.prompt_tokens + answer.completion_tokens for answer in fits} == {64}


def test_the_same_seed_gives_the_same_answers_and_another_does_not(model):
    first, again, other = (sampled_ids(sampler(model), Sampling(max_tokens=12, seed=seed), count=2) for seed in (5, 5, 6))
    assert first == again
    assert first != other
    assert first[0, 0] != first[0, 1]


def test_sampling_leaves_the_global_random_state_alone(model):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    sampled_ids(sampler(model), Sampling(max_tokens=4))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.8), (2.0, 0.5)])
def test_tokens_are_drawn_with_their_chances(model, temperature, top_p):
    local = sampler(model, batch_size=500)
    ids = local.prompt_ids(PROMPTS[0])
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([ids])).logits[0, -1] / temperature, -1)
    ordered, order = expected.sort(descending=True)
    nucleus = order[: int((ordered.cumsum(-1) < top_p).sum()) + 1]
    if top_p < 1:
        expected = torch.zeros_like(expected).index_copy(0, nucleus, expected[nucleus])
        expected /= expected.sum()
    local.stop_ids = ()
    answers = 2000
    drawn = torch.zeros_like(expected)
    for _, _, found in local.sample_ids(
        [ids], count=answers, sampling=Sampling(temperature=temperature, top_p=top_p, max_tokens=1)
    ):
        drawn[found.tokens[0]] += 1
    assert drawn[expected == 0].sum() == 0
    likely = expected * answers >= 5
    spread = ((drawn - expected * answers) ** 2 / (expected * answers))[likely].sum()
    # Chi-squared: mean k and standard deviation sqrt(2 k); the seed is fixed, so this cannot fail by chance later.
    freedom = int(likely.sum())
    assert freedom > 3
    assert spread < freedom + 4 * (2 * freedom) ** 0.5


def test_the_likeliest_token_is_always_among_those_drawn_from(model):
    assert sampled_ids(sampler(model), Sampling(top_p=1e-6, max_tokens=9)) == sampled_ids(sampler(model), greedy(9))


def starved(model, monkeypatch, rows: int):
    """A model that runs out of memory with more than so many sequences."""
    forward = model.forward

    def limited(**given):
        if len(given["input_ids"]) > rows:
            raise torch.OutOfMemoryError("injected")
        return forward(**given)

    monkeypatch.setattr(model, "forward", limited)


def test_out_of_memory_halves_the_batch_and_says_so(model, monkeypatch, caplog):
    expected = sampled_ids(sampler(model), greedy(), count=3)
    starved(model, monkeypatch, 3)
    local = sampler(model, batch_size=12)
    with caplog.at_level(logging.WARNING):
        assert sampled_ids(local, greedy(), count=3) == expected
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition("; ")[2] for text in said] == [
        "going on with 6, 12 answers still to sample",
        "going on with 3, 12 answers still to sample",
    ]
    caplog.clear()
    sampled_ids(local, greedy(4))
    assert caplog.records == [], "the batch that was too large was tried again"


def test_answers_that_were_done_are_not_sampled_again_after_running_out(model, monkeypatch):
    local = sampler(model, batch_size=4)
    failed = []

    def once(self, count, step=slots.SlotSampler._steps):
        step(self, count)
        if not failed and sum(owner is None for owner in self._owners) > 0:
            failed.append(True)
            raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(slots.SlotSampler, "_steps", once)
    local.stop_ids = (generated(model, local.prompt_ids(PROMPTS[0]))[5],)
    prompts = [local.prompt_ids(prompt) for prompt in PROMPTS]
    found = [(prompt, number) for prompt, number, _ in local.sample_ids(prompts, count=2, sampling=greedy())]
    assert failed
    assert sorted(found) == [(prompt, number) for prompt in range(4) for number in range(2)]


class Replayed:
    """What a CUDA graph does, without one: computes a step of fixed size again with what the slots hold by then."""

    def __init__(self, sampler: slots.SlotSampler, count: int, visible: int) -> None:
        self.replay = lambda: sampler._logits[:count].copy_(sampler._one_step(count, visible))


def test_a_step_is_recorded_once_for_each_size(model, monkeypatch):
    expected = sampled_ids(sampler(model), greedy(60), count=3)
    recorded = []

    def captured(self, count, visible):
        recorded.append((count, visible))
        self._graphs[count, visible] = Replayed(self, count, visible)
        return self._graphs[count, visible]

    built = slots.SlotSampler.__init__

    def with_graphs(self, *args, **given):
        built(self, *args, **given)
        self._use_graphs = True

    monkeypatch.setattr(slots.SlotSampler, "_captured", captured)
    monkeypatch.setattr(slots.SlotSampler, "__init__", with_graphs)
    assert sampled_ids(sampler(model, batch_size=8), greedy(60), count=3) == expected
    assert len(recorded) == len(set(recorded)) >= 4
    assert {count for count, _ in recorded} == {8, 4}


class Operations(TorchDispatchMode):
    """Notes which operations are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_a_step_asks_for_no_value_and_copies_nothing_in(model):
    """What cannot be recorded in a CUDA graph: reading a value back, sizes that depend on values, data of the CPU."""
    drawing = slots.Draw(1.0, 1.0, (3,), 0)
    step = slots.SlotSampler(model, slots=4, columns=64, draw=drawing, autocast=None, graphs=False)
    with slots.attention_of(model), torch.no_grad(), Operations() as seen:
        step._refill(deque(slots.Request(index, tuple(range(5 + index)), 8) for index in range(3)))
        assert {"lift_fresh", "index_put_"} <= seen.names, "the watch does not see what it should"
        seen.names.clear()
        step._one_step(4, 64)
    assert "index_put_" in seen.names
    assert (
        seen.names & {"lift_fresh", "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_unique2", "masked_select"}
        == set()
    )


def test_not_enough_memory_for_one_answer_is_an_error(model, monkeypatch):
    starved(model, monkeypatch, 0)
    with pytest.raises(PolicyError, match="does not suffice for one answer"):
        sampled_ids(sampler(model), greedy())


def test_other_errors_of_the_model_are_not_hidden(model, monkeypatch):
    monkeypatch.setattr(model, "forward", lambda **given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sampled_ids(sampler(model), greedy())


def test_a_trainers_model_is_sampled_as_it_is_and_left_as_it_was(model):
    local = sampler(model)
    before = sampled_ids(local, greedy(8))
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    after = sampled_ids(local, greedy(8))
    assert after != before
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    loss = model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
    loss.backward()
    assert model.lm_head.weight.grad is not None
    assert after[0, 0] == generated(model.eval(), local.prompt_ids(PROMPTS[0]), 8)


def test_weights_in_one_type_can_be_computed_in_another(model):
    local = sampler(model, autocast="bfloat16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = generated(model, local.prompt_ids(PROMPTS[0]), 3)
    assert sampled_ids(local, greedy(3))[0, 0] == expected


def with_lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return wrapped.eval()


def test_a_lora_in_training_is_in_effect(model):
    plain = sampled_ids(sampler(model), greedy(8))
    wrapped = with_lora(model)
    local = sampler(wrapped)
    found = sampled_ids(local, greedy(8))
    assert found != plain
    assert found[1, 0] == generated(wrapped, local.prompt_ids(PROMPTS[1]), 8)


def test_a_model_is_loaded_from_a_folder_with_its_adapter(model, tmp_path):
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    wrapped = with_lora(tiny_model())
    wrapped.save_pretrained(tmp_path / "lora")
    options = {"path": str(tmp_path / "base"), "device": "cpu", "batch_size": 2}
    plain, adapted = chat_model("local", **options), chat_model("local", **options, adapter=str(tmp_path / "lora"))
    assert (plain.name, adapted.name) == ("local:base", "local:base+lora")
    ids = plain.prompt_ids(PROMPTS[0])
    assert sampled_ids(plain, greedy(8))[0, 0] == generated(model, ids, 8)
    assert sampled_ids(adapted, greedy(8))[0, 0] == generated(wrapped, ids, 8)
    assert plain.usage.completion_tokens == 0
    plain.sample(PROMPTS, count=2, sampling=greedy(5))
    assert plain.usage.completion_tokens == 2 * 4 * 5
    assert plain.usage.prompt_tokens == sum(len(plain.prompt_ids(prompt)) for prompt in PROMPTS)


def write_gguf(model, path: Path) -> None:
    """The model as llama.cpp would store it, unquantised."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    # Byte-level BPE with two merges, for readers expect some; their tokens take the places of two bytes.
    words = tiny_vocabulary()
    words[254:256] = "yz", "zy"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if word.startswith("<|") else normal for word in words])
    writer.add_token_merges(["y z", "z y"])
    writer.add_eos_token_id(words.index("<|im_end|>"))
    writer.add_bos_token_id(words.index("<|endoftext|>"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_model_is_loaded_from_a_gguf_file(model, tmp_path):
    write_gguf(model, tmp_path / "tiny.gguf")
    local = LocalModel.load(Weights(path=str(tmp_path / "tiny.gguf"), device="cpu"))
    assert local.name == "local:tiny.gguf"
    # The file has no chat template.
    assert local.tokenizer.chat_template == pretrained.CHAT_TEMPLATE
    ids = local.prompt_ids(PROMPTS[1])
    assert local.tokenizer.decode(ids) == f"user:\n{TEXTS[1]}\n\nassistant:\n"
    local.stop_ids = ()
    assert sampled_ids(local, greedy(8))[1, 0] == generated(model, ids, 8)
    assert getattr(local.model.config, "quantization_config", None) is None


def test_the_plain_template_spells_conversations_as_training_does(model):
    local = sampler(model, template=False)
    turns = [Message("system", "be brief"), Message("user", "hi"), Message("assistant", "ho"), Message("user", "hum")]
    text = "system:\nbe brief\n\nuser:\nhi\n\nassistant:\nho<|endoftext|>\n\nuser:\nhum\n\nassistant:\n"
    assert local.tokenizer.decode(local.prompt_ids(turns)) == text


def test_what_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(PolicyError, match=r"there is nothing at .*nothing\.gguf"):
        LocalModel.load(Weights(path=str(tmp_path / "nothing.gguf")))
    (tmp_path / "junk.gguf").write_bytes(b"not a model")
    (tmp_path / "empty").mkdir()
    for name in ("junk.gguf", "empty"):
        with pytest.raises(PolicyError, match=r"Wanted a causal language model from .*\. Give a folder"):
            LocalModel.load(Weights(path=str(tmp_path / name)))


@pytest.mark.parametrize(
    "changes", [{"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8, "use_sliding_window": True}]
)
def test_a_kind_of_model_that_is_not_covered_is_refused(changes):
    with pytest.raises(PolicyError, match="use the policy `api`"):
        sampler(tiny_model(**changes))


def test_options_are_checked():
    with pytest.raises(ConfigError, match="The kinds are: api, local"):
        chat_model("cloud")
    with pytest.raises(ConfigError, match="Did you mean 'adapter'"):
        chat_model("local", path="x", adaptor="y")
    with pytest.raises(ConfigError, match="'memory_share'"):
        chat_model("local", path="x", memory_share=2)
    with pytest.raises(ConfigError, match="'path'"):
        chat_model("local")


def test_an_endpoint_is_chosen_by_name():
    pytest.importorskip("openai")
    assert chat_model("api", model="m", base_url="http://localhost:1/v1").name == "api:m"


def test_the_package_is_imported_without_any_model_library():
    code = (
        "import sys, kernelwright.search.policies, kernelwright.models.factory, kernelwright.models.transcript\n"
        "print(sorted({'openai', 'transformers', 'torch', 'peft'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PolicyError, match=r"pip install 'kernelwright\[local\]'"):
        chat_model("local", path="x")


def test_the_tiny_model_needs_no_files_and_is_the_same_every_time():
    prompt = [[Message("user", "hi")]]
    first, second = (
        chat_model("local", path="tiny-random", device="cpu").sample(prompt, count=1, sampling=greedy(5)) for _ in range(2)
    )
    assert first[0][0].completion_tokens == 5
    assert first[0][0].text == second[0][0].text
