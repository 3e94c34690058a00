"""A model behind an endpoint, driven over a real socket: answers, faults, accounting, and where the key does not go."""

from __future__ import annotations

import logging
import pickle
import random
import threading
import traceback
from collections.abc import Iterator

import pytest

pytest.importorskip("openai")

from kernelwright.errors import ConfigError, PolicyError
from kernelwright.models.api import ApiModel, ApiSettings
from kernelwright.models.chat import Message, Prices, Sampling, Usage
from kernelwright.models.factory import chat_model
from kernelwright.models.replies import redacted, retry_after_s
from kernelwright.models.transcript import Recorded, Transcript
from tests.models.fake_openai_server import FakeServer, Fault, status
from tests.quick import exhaustive_but

KEY = "sk-test-4711-very-secret"
SAMPLING = Sampling(temperature=0.7, top_p=0.9, max_tokens=64, seed=10)


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def clock() -> Clock:
    return Clock()


def model_of(server: FakeServer, clock: Clock, environ: dict[str, str] | None = None, **options) -> ApiModel:
    settings = ApiSettings(**{"model": "fake", "base_url": server.url, "concurrency": 1} | options)
    return ApiModel(settings, environ={"OPENAI_API_KEY": KEY} | (environ or {}), sleep=clock.sleep, clock=clock)


def ask(model: ApiModel, *texts: str, count: int = 1):
    return model.sample([[Message("user", text)] for text in texts], count=count, sampling=SAMPLING)


def only(model: ApiModel):
    return ask(model, "hello")[0][0]


@pytest.mark.parametrize("stream", [True, False])
def test_each_prompt_gets_its_answers_in_order(server, clock, stream):
    model = model_of(server, clock, stream=stream, concurrency=4)
    answers = ask(model, "one", "two words", count=3)
    assert [[found.text for found in group] for group in answers] == [
        ["one #10", "one #11", "one #12"],
        ["two words #10", "two words #11", "two words #12"],
    ]
    assert {found.finish_reason for group in answers for found in group} == {"stop"}
    assert {found.failure for group in answers for found in group} == {None}


def test_what_is_sent(server, clock):
    model = model_of(server, clock, extra_body={"top_k": 5}, max_tokens_field="max_completion_tokens")
    model.sample([[Message("system", "be brief"), Message("user", "hi")]], count=2, sampling=SAMPLING)
    (seen,) = server.seen
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["authorization"] == f"Bearer {KEY}"
    assert seen.body == {
        "model": "fake",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "temperature": 0.7,
        "top_p": 0.9,
        "max_completion_tokens": 64,
        "n": 2,
        "seed": 10,
        "top_k": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_the_limit_of_an_answer_goes_by_the_name_that_a_refusal_tells(server, clock):
    server.faults.append(status(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."))
    model = model_of(server, clock)
    assert [only(model).text, only(model).text] == ["hello #10"] * 2
    assert [{"max_tokens", "max_completion_tokens"} & {*seen.body} for seen in server.seen] == [
        {"max_tokens"}, {"max_completion_tokens"}, {"max_completion_tokens"},
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["refused", "ignored"])
def test_several_answers_of_a_server_that_gives_one_at_a_time(clock, how):
    with FakeServer(n=how) as server:
        model = model_of(server, clock)
        assert [found.text for found in ask(model, "one", count=3)[0]] == ["one #10", "one #11", "one #12"]
        asked = len(server.seen)
        ask(model, "one", count=3)
    assert {seen.body.get("n", 1) for seen in server.seen[asked:]} == {1}, "it asks for several again"


def test_a_refusal_that_is_not_about_n_does_not_end_the_use_of_n(server, clock):
    server.faults += [status(400, "context too long")] * 3
    model = model_of(server, clock)
    assert {found.failure for found in ask(model, "one", count=2)[0]} == {"refused: context too long"}
    assert server.seen[-1].body.get("n") is None
    ask(model, "one", count=2)
    assert server.seen[-1].body["n"] == 2


def test_a_rate_limit_is_waited_out_as_long_as_the_server_says(server, clock):
    server.faults += [status(429, Retry_After="17"), status(429, Retry_After_Ms="2500")]
    model = model_of(server, clock)
    assert only(model).text == "hello #10"
    assert clock.slept == [17.0, 2.5]
    assert model.usage.retries == 2


def test_a_rate_limit_holds_back_the_other_requests_too(server, clock):
    """The wait is everybody's, not slept by the one that was turned away: a longer one may join it meanwhile."""
    server.faults += [status(429, Retry_After="30")] * 2
    model = model_of(server, clock)
    started = []
    attempt = model._attempt
    model._attempt = lambda *given: started.append(clock.now_s) or attempt(*given)
    held = model._pacer.hold
    # Another request is turned away while this one waits.
    model._pacer.hold = lambda wait_s: held(wait_s) or held(wait_s + 5)
    ask(model, "one")
    assert [start_s - 1000 for start_s in started] == [0, 35, 70]


@pytest.mark.parametrize(
    "fault",
    exhaustive_but(
        [status(500), status(503), status(529), Fault("close"), Fault("cut", pieces=0)], status(503), Fault("cut", pieces=0)
    ),
    ids=lambda fault: fault.kind,
)
def test_passing_faults_are_tried_again_with_growing_waits(server, clock, fault):
    server.faults += [fault] * 3
    assert only(model_of(server, clock)).text == "hello #10"
    assert len(clock.slept) == 3
    for slept, longest in zip(clock.slept, (1, 2, 4), strict=True):
        assert longest / 2 <= slept <= longest


def test_a_server_that_asks_for_more_patience_than_there_is_is_left_alone(server, clock):
    ask(model := model_of(server, clock, longest_wait_s=60), "first")
    server.faults.append(status(429, Retry_After="3600"))
    with pytest.raises(PolicyError, match="requests_per_minute"):
        only(model)
    assert clock.slept == []


def test_the_wait_may_be_a_date():
    assert retry_after_s({"retry-after": "Sat, 21 Nov 2026 08:00:30 GMT"}, 1795248000.0) == 30.0
    assert retry_after_s({"retry-after": "soon"}) is None
    assert retry_after_s({}) is None
    assert retry_after_s({"retry-after": "inf"}) is None


def test_one_request_out_of_luck_is_data_when_others_are_answered(server, clock):
    model = model_of(server, clock, attempts=2)
    server.faults += [Fault("no-end", pieces=99), status(500), status(500)]
    answered, failed = ask(model, "one", "two")
    assert answered[0].failure is None
    assert failed[0].failure is not None
    assert failed[0].failure.startswith("server-error")
    assert failed[0].text == ""
    assert model.usage.failures == 1


def test_an_endpoint_that_only_fails_is_an_error(server, clock):
    server.faults += [status(502)] * 2
    with pytest.raises(PolicyError, match=r"after 2 attempts: server-error.*endpoint is up"):
        ask(model_of(server, clock, attempts=2), *["again"] * 50)
    assert len(server.seen) <= 4


def test_an_endpoint_that_is_not_there_is_an_error(clock):
    with FakeServer() as server:
        pass
    with pytest.raises(PolicyError, match="unreachable"):
        only(model_of(server, clock, attempts=2))
    assert len(clock.slept) == 1


@pytest.mark.parametrize("fault", [Fault("cut", pieces=2), Fault("no-end", pieces=2)], ids=lambda fault: fault.kind)
def test_a_stream_cut_short_keeps_what_arrived(server, clock, fault):
    server.faults.append(fault)
    found = only(model := model_of(server, clock))
    assert (found.text, found.failure) == ("hello #1"[:8], "stream-cut")
    assert clock.slept == []
    assert model.usage == Usage(requests=1, failures=1, unreported=1)


def test_a_server_that_does_not_stream_is_read_all_the_same_and_that_is_said_once(server, clock, caplog):
    server.faults += [Fault("whole"), Fault("whole")]
    model = model_of(server, clock)
    assert [only(model).failure, only(model).failure] == [None, None]
    assert model.usage.prompt_tokens > 0
    assert [record.getMessage().count("does not stream") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    ("fault", "stream", "failure"),
    [
        (
            Fault("html"),
            True,
            'junk-answer: no event stream came but text/html that begins "<html>a proxy\'s page</html>": see',
        ),
        (Fault("html"), False, "junk-answer"),
        (Fault("bad-json"), False, "junk-answer"),
        (Fault("bad-json"), True, "junk-answer: no event stream came but application/json that begins '{"),
        (Fault("no-choices"), True, "junk-answer: no event stream came but application/json that begins '{"),
        (Fault("no-events"), True, "empty-answer"),
        (Fault("no-choices"), False, "empty-answer"),
        (Fault("bad-chunk"), True, "junk-answer"),
        (Fault("error-event", message="overloaded"), True, "provider-error"),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_junk_is_a_failed_answer(server, clock, fault, stream, failure):
    server.faults.append(fault)
    found = only(model_of(server, clock, stream=stream))
    assert found.failure is not None
    assert found.failure.startswith(failure)


def test_an_empty_text_is_a_failed_answer(clock):
    with FakeServer(lambda messages, seed: "") as server:
        assert only(model_of(server, clock)).failure == "empty-answer"


@pytest.mark.parametrize(("word", "failure"), [("length", None), ("content_filter", "content-filter")])
def test_why_an_answer_ended_is_passed_on(clock, word, failure):
    with FakeServer(finish_reason=word) as server:
        found = only(model_of(server, clock))
    assert (found.finish_reason, found.failure) == (word, failure)


def test_a_silent_server_is_given_up(server, clock):
    server.faults += [Fault("silence"), Fault("stall", pieces=1)]
    found = only(model_of(server, clock, silence_timeout_s=0.2))
    assert (found.text, found.failure) == ("hell", "timeout")
    assert len(clock.slept) == 1


def test_an_answer_that_trickles_for_ever_is_cut(server, clock):
    found = ApiModel(
        ApiSettings(model="fake", base_url=server.url, answer_timeout_s=5),
        environ={},
        clock=iter(range(0, 1000, 2)).__next__,
    ).sample([[Message("user", "a long answer indeed")]], count=1, sampling=SAMPLING)[0][0]
    assert found.failure == "timeout"
    assert "a long answer indeed".startswith(found.text.strip())
    assert found.text


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        (status(401, f"Incorrect API key provided: {KEY}"), "OPENAI_API_KEY"),
        (status(402, "Insufficient Balance"), "top it up"),
        (Fault("status", 429, "You exceeded your quota", code="insufficient_quota"), "top it up"),
        (status(404, "no such page"), "/v1"),
        (status(400, "Model Not Exist"), "has the model 'fake'"),
    ],
    ids=["key", "credit", "quota", "address", "model"],
)
def test_what_every_request_would_get_is_an_error_at_once(server, clock, fault, advice):
    server.faults += [fault] * 100
    with pytest.raises(PolicyError, match=advice) as caught:
        ask(model_of(server, clock), *["again"] * 100)
    assert KEY not in everything_in(caught.value)
    assert len(server.seen) < 10
    assert clock.slept == []


def test_an_unknown_model_is_an_error_that_names_it(server, clock):
    with pytest.raises(PolicyError, match="has the model 'other'"):
        only(model_of(server, clock, model="other"))


def test_no_more_requests_in_flight_than_allowed(server, clock):
    server.gate.clear()
    model = model_of(server, clock, concurrency=3)
    asking = threading.Thread(target=ask, args=(model, *map(str, range(9))))
    asking.start()
    while len(server.seen) < 3:
        pass
    server.gate.set()
    asking.join()
    assert server.most_in_flight <= 3
    assert len(server.seen) == 9


def test_requests_are_spaced_to_a_rate(server, clock):
    ask(model_of(server, clock, requests_per_minute=20), "one", "two", "three")
    assert clock.slept == pytest.approx([3.0, 3.0])


def test_tokens_and_money_are_counted(clock):
    with FakeServer(lambda messages, seed: "five words of some answer", reasoning="hm hm") as server:
        model = model_of(server, clock, prices=Prices(input=2.0, cached_input=0.5, output=10.0))
        answers = list(model.answers([[Message("user", "four words of prompt")]], count=2, sampling=SAMPLING))
    # Two answers of five words and two of reasoning; the prompt's four words, two of them cached, are charged once.
    assert model.usage == Usage(
        requests=1, prompt_tokens=4, cached_prompt_tokens=2, completion_tokens=12, reasoning_tokens=2
    )
    expected = (2 * 2.0 + 2 * 0.5 + 12 * 10.0) / 1e6
    assert model.cost == pytest.approx(expected)
    assert sum(answer.cost or 0 for answer in answers) == pytest.approx(expected)
    assert [answer.completion.completion_tokens for answer in answers] == [6, 6]
    assert [answer.completion.prompt_tokens for answer in answers] == [4, 4]
    assert {answer.reasoning for answer in answers} == {"hm hm"}
    assert {answer.completion.text for answer in answers} == {"five words of some answer"}


def test_nothing_is_invented_where_nothing_is_known(clock):
    with FakeServer(tells_usage=False) as server:
        model = model_of(server, clock, prices=Prices(input=1, output=1))
        (answer,) = model.answers([[Message("user", "hi")]], count=1, sampling=SAMPLING)
    assert answer.cost is None
    assert model.usage.unreported == 1
    with FakeServer() as server:
        model = model_of(server, clock)
        (answer,) = model.answers([[Message("user", "hi")]], count=1, sampling=SAMPLING)
    assert answer.cost is None
    assert model.cost is None


def test_model_address_and_key_come_from_the_environment(server, clock):
    environ = {"OPENAI_MODEL": "fake", "OPENAI_BASE_URL": server.url, "DEEPSEEK_KEY": KEY}
    model = ApiModel(ApiSettings(key_variable="DEEPSEEK_KEY"), environ=environ)
    assert model.name == "api:fake"
    assert only(model).text == "hello #10"
    assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"


def test_what_is_missing_is_named():
    with pytest.raises(PolicyError, match="OPENAI_MODEL"):
        ApiModel(ApiSettings(), environ={})
    with pytest.raises(PolicyError, match="MY_KEY is not set"):
        ApiModel(ApiSettings(model="x", key_variable="MY_KEY"), environ={})


@pytest.mark.parametrize("url", [f"https://me:{KEY}@host/v1", f"https://host/v1?key={KEY}", f"{KEY}/v1"])
def test_an_address_with_a_secret_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigError) as caught:
        ApiModel(ApiSettings(model="x", base_url=url), environ={})
    assert KEY not in everything_in(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        *((url, "found no http:// or https:// with a host") for url in ("http://[::1/v1", "http://host:0/v1", "ftp://host")),
        ("host:8000/v1", "http:// is missing"),
    ],
)
def test_an_address_that_is_none_is_refused(url, said):
    with pytest.raises(ConfigError, match=said):
        ApiModel(ApiSettings(model="x", base_url=url), environ={})


def test_a_misspelt_price_is_named_and_not_the_one_that_lacks():
    with pytest.raises(ConfigError, match=r"option 'prices\.inptu'; it does not exist"):
        chat_model("api", model="x", prices={"inptu": 1, "output": 1})


def test_white_space_around_a_key_is_no_part_of_it(server, clock):
    model = ApiModel(ApiSettings(model="fake", base_url=server.url), environ={"OPENAI_API_KEY": f" {KEY}\r\n"})
    assert only(model).text == "hello #10"
    assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("key", [f"{KEY}\nmore", f"{KEY} more", f"{KEY}é", f"{KEY}\0"])
def test_a_key_that_no_header_can_carry_is_refused_before_any_request_and_not_shown(key):
    with pytest.raises(PolicyError, match="environment variable MY_KEY") as caught:
        ApiModel(ApiSettings(model="x", base_url="http://host/v1", key_variable="MY_KEY"), environ={"MY_KEY": key})
    assert KEY[:6] not in everything_in(caught.value)


def everything_in(error: BaseException) -> str:
    """Whatever a log, a crash report or a pickled exception could show."""
    texts = ["".join(traceback.format_exception(error)), pickle.dumps(error).decode("latin-1")]
    while error is not None:
        texts += [repr(error), str(vars(error))]
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


def test_the_key_appears_nowhere(clock, tmp_path, caplog, capsys):
    caplog.set_level(logging.DEBUG)
    with FakeServer(key="another") as server:
        model = model_of(server, clock, prices=Prices(input=1, output=1))
        transcript = Transcript(tmp_path / "transcript.jsonl")
        with pytest.raises(PolicyError, match="refuses with status 401") as caught:
            Recorded(model, transcript).sample([[Message("user", "hi")]], count=1, sampling=SAMPLING)
    with FakeServer(key=KEY) as server:
        server.faults += [status(500, f"we saw {KEY} here"), status(400, f"no {KEY}"), Fault("error-event", message=KEY)]
        model = model_of(server, clock)
        Recorded(model, transcript).sample([[Message("user", "hi")]] * 3, count=1, sampling=SAMPLING)
        assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"
    shown = [everything_in(caught.value), caplog.text, *capsys.readouterr(), transcript.path.read_text()]
    shown += [repr(model), model.settings.model_dump_json(), model.name, repr(model.usage)]
    assert "[key]" in shown[0]
    assert "[key]" in transcript.path.read_text()
    for text in shown:
        assert KEY not in text
        assert KEY[:12] not in text


def test_a_key_with_its_middle_starred_out_is_hidden_too():
    assert redacted(f"bad key {KEY[:8]}****cret,\n try again", KEY) == "bad key [key] try again"
    assert redacted("bad key abc.", "abc") == "bad key [key]."
    assert redacted("x" * 1000, KEY) == "x" * 300


def test_the_global_random_state_is_left_alone(server, clock):
    server.faults += [status(500)] * 2
    random.seed(1)
    expected = random.Random(1).random()
    only(model_of(server, clock))
    assert random.random() == expected
