"""A person's day with a stack: up, ask, look, lose a process, down. One stack; tests run in this order."""

import json
import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest

from sumibi.admin import Admin
from sumibi.demo.play import Door, play
from sumibi.demo.script import SEED, busy_request, prefix_phases
from sumibi.demo.texts import Texts

LONG = "embers keep the kettle warm through the night. " * 20


@pytest.fixture(scope="module")
def stack(sumibi, free_ports):
    """A running stack; gone at the end whatever happened."""
    first = free_ports(4)
    (sumibi.home / "stack.yaml").write_text("gateway: {drain_timeout_s: 2}\n")
    flags = ["--model", "tiny", "--engine-port", str(first), "--port", str(first + 2)]
    started = sumibi("up", *flags, "--admin-port", str(first + 3))
    try:
        assert started.returncode == 0, started.stderr
        yield started, f"http://127.0.0.1:{first + 2}"
    finally:
        sumibi("down")


@pytest.fixture
def url(stack):
    return stack[1]


def status(sumibi) -> dict:
    return json.loads(sumibi("status", "--json").stdout)


def process(sumibi, name: str) -> dict:
    return next(child for child in status(sumibi)["stack"]["children"] if child["name"] == name)


def endpoint(sumibi, number: int) -> dict:
    return sorted(status(sumibi)["fleet"]["endpoints"], key=lambda one: one["endpoint"])[number]


def body(**more) -> dict:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4} | more


def test_up_prints_a_url_a_curl_line_and_how_to_stop(stack):
    started, url = stack
    assert f"ready at {url}/v1 (model tiny)" in started.stdout
    assert "sumibi down\n" in started.stdout
    assert "engine-1: ready" in started.stderr


def test_keys_check_says_whether_an_engine_reads_prompts_as_the_gateway_does(stack, sumibi):
    engine = endpoint(sumibi, 0)["endpoint"].removesuffix("#0")
    same = sumibi("keys", "check", "--against", engine, "--conversations", "26")
    assert same.returncode == 0, same.stdout
    assert "requests have the same tokens here and at the engine" in same.stdout

    other = sumibi.home / "other.jinja"
    other.write_text("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    wrong = sumibi("keys", "check", "--against", engine, "--template", str(other), "--json")
    assert wrong.returncode == 1
    found = json.loads(wrong.stdout)
    assert sum(habit["same"] for habit in found["habits"]) == 0
    assert "the engine has another template" in found["differences"][0]["cause"]


def test_the_printed_curl_line_works(stack, sumibi):
    started, _ = stack
    lines = started.stdout.split("try it:\n")[1].split("\n\n")[0]

    done = subprocess.run(
        ["bash", "-c", lines.replace("curl ", "curl -sS --fail ")], capture_output=True, check=True
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] is not None


def test_a_second_up_says_that_it_runs(stack, sumibi):
    again = sumibi("up", "--model", "tiny")
    assert again.returncode == 0
    assert f"already running at {stack[1]}/v1" in again.stdout


def test_an_up_with_other_settings_is_refused_and_says_what_to_do(stack, sumibi):
    refused = sumibi("up", "--model", "tiny", "--policy", "round-robin")
    assert refused.returncode == 2
    assert "gateway.policy cost (not round-robin); `sumibi down` stops it" in refused.stderr
    assert sumibi("up").returncode == 0
    assert sumibi("up", "--model", "nowhere").returncode == 3


def test_status_shows_every_process_and_knows_every_cache(stack, sumibi):
    shown = sumibi("status")
    assert shown.returncode == 0
    assert shown.stdout.count("exact") == 2
    found = status(sumibi)
    assert [child["state"] for child in found["stack"]["children"]] == ["ready"] * 3
    assert found["ready"]


def test_doctor_finds_nothing_wrong_with_a_running_stack(stack, sumibi):
    asked = sumibi("doctor", "--json")
    assert asked.returncode == 0, asked.stdout + asked.stderr
    checks = json.loads(asked.stdout)
    assert [check for check in checks if check["verdict"] == "problem"] == []
    assert {"engine-0", "engine-1", "gateway"} <= {check["name"] for check in checks}


def test_the_openai_client_streams_and_is_told_what_was_cached(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    cached = []
    for _ in range(2):
        with client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": LONG}],
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            usage = [chunk.usage for chunk in stream if chunk.usage][-1]
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert cached[1] >= 0.9 * usage.prompt_tokens - 32
    assert client.models.list().data[0].id == "tiny"


@pytest.mark.parametrize(
    ("sent", "code", "said"),
    [
        (b"{nonsense", 400, "JSON"),
        (json.dumps(body(model="gpt-9")), 404, "gpt-9"),
        (json.dumps(body(messages="hello")), 400, "messages"),
        (json.dumps(body(max_tokens=-1)), 400, "max_tokens"),
        (json.dumps(body(max_tokens="four")), 400, "max_tokens"),
        (json.dumps(body(temperature=-0.5)), 400, "temperature"),
        (json.dumps(body(messages=[{"role": "user", "content": "x" * 20_000}])), 400, "tokens"),
    ],
    ids=[
        "malformed JSON",
        "unknown model",
        "wrong type",
        "negative limit",
        "wrong limit",
        "negative temperature",
        "too long",
    ],
)
def test_a_bad_request_is_answered_in_openai_s_shape_and_loses_nothing(url, sent, code, said):
    answer = httpx.post(f"{url}/v1/chat/completions", content=sent, timeout=30)
    assert answer.status_code == code
    error = answer.json()["error"]
    assert said in error["message"] + str(error.get("param"))
    assert httpx.post(f"{url}/v1/chat/completions", json=body(), timeout=30).status_code == 200


def test_the_demonstration_plays_on_a_stack_and_reads_placements_back(url, sumibi):
    texts = Texts(len, SEED)  # the tiny model's tokens are bytes
    admin = Admin.of(sumibi.state, status(sumibi)["stack"]["admin_url"])
    shown: list[str] = []
    steps = [step for step in prefix_phases(texts) if step.phase < 6]
    door = Door(url, "tiny", admin)
    results = list(play(door, steps, "cost", busy_request(texts), lambda who, what, done: shown.append(what)))
    one, two, three, four, five = results
    assert one.endpoint == two.endpoint == three.endpoint != ""
    assert four.endpoint == five.endpoint
    assert (one.cached_tokens, four.cached_tokens) == (0, 0)
    assert min(two.cached_tokens, three.cached_tokens, five.cached_tokens) >= 1400
    assert all(result.ttft_s > 0 for result in results)
    assert len(shown) == 5


def load(url: str, answers: list[str], turns: int) -> list[threading.Thread]:
    """Four clients that stream `turns` answers each, one after the other, and note how each ended."""

    def ask(number: int) -> None:
        for turn in range(turns):
            text = f"{len(answers)}.{number}.{turn} {LONG}"
            sent = body(messages=[{"role": "user", "content": text}], max_tokens=32, stream=True)
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=sent, timeout=60) as got:
                said = got.read().decode()
            answers.append("done" if "[DONE]" in said else "error" if '"error"' in said else said)

    askers = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for asker in askers:
        asker.start()
    return askers


def test_an_engine_killed_under_load_is_replaced_and_no_request_goes_unanswered(url, sumibi, eventually):
    engine, epoch = process(sumibi, "engine-0"), endpoint(sumibi, 0)["epoch"]
    answers: list[str] = []
    askers = load(url, answers, turns=6)
    eventually(lambda: len(answers) >= 4)
    os.kill(engine["pid"], signal.SIGKILL)
    for asker in askers:
        asker.join(60)
    assert len(answers) == 24
    assert set(answers) <= {"done", "error"}
    assert answers.count("done") >= 20  # at most the four that were streaming broke off

    eventually(lambda: process(sumibi, "engine-0")["state"] == "ready")
    eventually(lambda: endpoint(sumibi, 0)["up"] and endpoint(sumibi, 0)["grade"] == "exact")
    back = endpoint(sumibi, 0)
    assert process(sumibi, "engine-0")["restarts"] == 1
    assert back["epoch"] > epoch
    assert back["blocks"] == 0
    for asker in load(url, answers, turns=2):
        asker.join(60)
    assert endpoint(sumibi, 0)["dispatched"] > back["dispatched"]


def test_a_gateway_that_was_killed_learns_the_caches_again_by_replay(url, sumibi, eventually):
    blocks = [endpoint(sumibi, number)["blocks"] for number in (0, 1)]
    os.kill(process(sumibi, "gateway")["pid"], signal.SIGKILL)
    eventually(
        lambda: process(sumibi, "gateway")["restarts"] == 1 and process(sumibi, "gateway")["state"] == "ready"
    )
    eventually(lambda: status(sumibi)["ready"])
    eventually(lambda: [endpoint(sumibi, number)["blocks"] for number in (0, 1)] == blocks)
    assert {endpoint(sumibi, number)["grade"] for number in (0, 1)} == {"exact"}


def test_down_leaves_no_process_no_port_and_no_request_without_an_answer(url, sumibi, eventually):
    children = status(sumibi)["stack"]["children"]
    pids = [child["pid"] for child in children]
    engines = [child["pid"] for child in children if child["name"] != "gateway"]
    answers: dict[str, tuple[int, str]] = {}
    begun = threading.Event()

    def ask(name: str, **more: object) -> None:
        sent = body(ignore_eos=True, n=4, max_tokens=3000, **more)
        headers = {"x-request-id": name}
        client = httpx.Client(base_url=url, headers=headers, timeout=60)
        with client, client.stream("POST", "/v1/chat/completions", json=sent) as got:
            pieces = []
            for piece in got.iter_text():
                pieces.append(piece)
                if not begun.is_set():  # engines that stand still finish nothing within the drain time
                    for pid in engines:
                        os.kill(pid, signal.SIGSTOP)
                    begun.set()
        answers[name] = got.status_code, "".join(pieces)

    with ThreadPoolExecutor() as pool:
        askers = [pool.submit(ask, "stream", stream=True)]
        try:
            assert begun.wait(20)
            askers.append(pool.submit(ask, "whole"))
            eventually(lambda: 'in_flight{model="tiny"} 2' in httpx.get(f"{url}/metrics").text)
            down = pool.submit(sumibi, "down")
            for asker in askers:
                asker.result(60)
        finally:
            for pid in engines:
                os.kill(pid, signal.SIGCONT)
        said = down.result()
    assert said.stdout == "stopped\n"
    assert "running requests get up to 2 s to finish" in said.stderr
    last = answers["stream"][1].strip().rpartition("\n")[2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "rejected-shutting-down"
    assert answers["whole"][0] == 503
    assert json.loads(answers["whole"][1])["error"]["code"] == "rejected-shutting-down"
    records = [json.loads(line) for line in (sumibi.state / "usage.jsonl").read_text().splitlines()]
    ended = {record["request"]: record["reason"] for record in records[-2:]}
    assert ended == {"stream": "shutdown", "whole": "shutdown"}
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    assert sumibi("status").returncode == 1
