"""`vllm serve MODEL --speculative-model medusa`: the real server, its API and its refusals."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.engine.conftest import EOS_TOKEN_ID, MARKS, VOCAB_SIZE

VLLM = str(Path(sys.executable).with_name("vllm"))
START_SECONDS = 300


def environment(**extra: str) -> dict[str, str]:
    variables = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **extra}
    # The server's own default: front end and engine are two processes.
    variables.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return variables


def serve_command(model: Path, *flags: str) -> list[str]:
    return [
        VLLM, "serve", str(model), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "256", "--max-num-seqs", "4", "--block-size", "32", *flags,
    ]  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running server: `log` is its output, `post` and `get` talk to it."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        self.port = free_port()
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                serve_command(model, "--port", str(self.port), *flags),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(VLLM_LOGGING_LEVEL="INFO"),
            )

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        pytest.fail(f"no server after {START_SECONDS} s: {self.log.read_text()[-4000:]}")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return answer.read().decode()  # type: ignore[no-any-return]

    def post(self, path: str, body: dict[str, Any]) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read().decode()  # type: ignore[no-any-return]

    def counter(self, name: str) -> float:
        """A counter of /metrics that has one series."""
        [line] = [line for line in self.get("/metrics").splitlines() if line.startswith(name)]
        return float(line.rsplit(" ", 1)[1])

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


DAMAGED = "\U0010ffff"


@pytest.fixture(scope="module")
def damaged_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, but for the first token of `DAMAGED`, which is embedded as NaN."""
    directory = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(tiny_model, directory)
    token = AutoTokenizer.from_pretrained(directory).encode(DAMAGED)[0]
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = math.nan
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def server(
    tiny_model: Path,
    damaged_model: Path,
    random_heads: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    running = Server(
        damaged_model,
        tmp_path_factory.mktemp("serve") / "log",
        *("--served-model-name", str(tiny_model)),
        *("--speculative-model", "medusa", "--medusa-heads", str(random_heads)),
        *("--medusa-tree", "[[0], [1], [0, 0], [0, 1], [0, 0, 0]]"),
        # Random heads lose, so an engine that weighs its sizes soon drafts nothing.
        *("--medusa-sizes", "fixed"),
        *("--chat-template", "{{ messages[0].content }}"),
        *("--reasoning-parser", "deepseek_r1"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    )
    running.wait()
    yield running
    running.stop()


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def test_completions_equal_plain(server: Server, make_engine: Any, tiny_model: Path) -> None:
    from vllm import SamplingParams

    body = {
        "model": str(tiny_model), "prompt": PROMPT, "max_tokens": 40, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    answer = json.loads(server.post("/v1/completions", body))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain = make_engine().generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert answer["choices"][0]["text"] == plain[0].outputs[0].text
    assert answer["usage"]["completion_tokens"] == 40
    chunks = server.post("/v1/completions", body | {"stream": True}).splitlines()
    events = [line.removeprefix("data: ") for line in chunks if line.startswith("data: {")]
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == plain[0].outputs[0].text


def test_start_up_line_and_metrics(server: Server) -> None:
    log = server.log.read_text()
    assert "tree of 5 nodes, depth 3" in log
    assert "acceptance lossless" in log
    assert "medusa kernels ready" in log
    assert server.counter("vllm:spec_decode_num_draft_tokens_total") > 0


def test_a_bad_request_is_refused_and_the_server_lives(server: Server, tiny_model: Path) -> None:
    body = {"model": str(tiny_model), "prompt": PROMPT, "max_tokens": 4}
    with pytest.raises(urllib.error.HTTPError, match="400"):
        server.post("/v1/completions", body | {"temperature": -1})
    assert json.loads(server.post("/v1/completions", body | {"min_p": 0.1}))["choices"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_numbers_that_are_not_finite_get_a_500_and_the_server_lives(
    server: Server, tiny_model: Path, path: str, stream: bool
) -> None:
    body = {"model": str(tiny_model), "max_tokens": 4, "temperature": 0, "stream": stream}

    def prompt(text: str) -> dict[str, Any]:
        chat = {"messages": [{"role": "user", "content": text}]}
        return chat if path.endswith("chat/completions") else {"prompt": text}

    damaged = body | prompt(f"a{DAMAGED}b")
    for asked in (damaged, damaged | {"n": 2, "temperature": 1.0}):
        if stream:
            lines = server.post(path, asked).splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert lines[-1] == "" or lines[-1] == "data: [DONE]"
            answer = events[-1]
        else:
            with pytest.raises(urllib.error.HTTPError, match="500") as caught:
                server.post(path, asked)
            answer = json.loads(caught.value.read())
        assert (answer["error"]["type"], answer["error"]["code"]) == ("InternalServerError", 500)
    assert "error" not in server.post(path, body | prompt("ab"))


@pytest.mark.parametrize(
    ("options", "others", "message"),
    [
        ('{"enable": false}', {}, "unknown option 'enable'"),
        ('{"max_nodes": 64}', {}, "option 'max_nodes' is a whole number from 1 to 63"),
        ("{", {}, "is not JSON"),
        (7, {}, "must be an object or its JSON text"),
        ('{"acceptance": "typical"}', {"top_p": 0.9}, "cannot be combined with top_p=0.9"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bad_request_options_get_a_400_and_the_server_lives(
    server: Server,
    tiny_model: Path,
    path: str,
    options: Any,
    others: dict[str, Any],
    message: str,
) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    prompt = {"prompt": PROMPT} if path == "/v1/completions" else chat
    body = {"model": str(tiny_model), "max_tokens": 4, "temperature": 1.0, **prompt}
    asked = body | {"vllm_xargs": {"medusa": options}, **others}
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        server.post(path, asked)
    # vLLM has begun a stream before it looks at a request: its refusals are events of the stream.
    event = server.post(path, asked | {"stream": True}).splitlines()[0].removeprefix("data: ")
    for answer in (caught.value.read(), event):
        error = json.loads(answer)["error"]
        assert message in error["message"]
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert json.loads(server.post(path, body))["choices"]


def test_request_options_by_http(server: Server, tiny_model: Path) -> None:
    """`vllm_xargs` takes no nested objects, so the options come as text."""
    body = {
        "model": str(tiny_model), "prompt": PROMPT, "max_tokens": 40, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    expected = json.loads(server.post("/v1/completions", body))["choices"][0]["text"]
    before = server.counter("vllm:spec_decode_num_draft_tokens_total")
    asked = body | {"vllm_xargs": {"medusa": '{"enabled": false}'}}
    answer = json.loads(server.post("/v1/completions", asked))
    assert answer["choices"][0]["text"] == expected
    assert server.counter("vllm:spec_decode_num_draft_tokens_total") == before
    asked = body | {"vllm_xargs": {"medusa": '{"acceptance": "typical", "max_nodes": 2}'}}
    answer = json.loads(server.post("/v1/completions", asked | {"temperature": 1.0, "seed": 1}))
    assert answer["usage"]["completion_tokens"] == 40
    assert server.counter("vllm:spec_decode_num_draft_tokens_total") > before


WORD_PATTERN = re.compile("[a-zA-Z0-9]{8,16}")
WORD = {
    "type": "object",
    "properties": {"word": {"type": "string", "pattern": f"^{WORD_PATTERN.pattern}$"}},
    "required": ["word"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "say", "parameters": WORD, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": WORD}}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "say"}}},
    ],
    ids=["json_schema", "required_tool", "named_tool"],
)
def test_structured_answers_after_reasoning(
    server: Server, tiny_model: Path, asked: dict[str, Any], stream: bool
) -> None:
    """Drafted or not, the same reasoning and the same answer, which conforms."""
    [end] = [token for token, mark in MARKS.items() if mark == "</think>"]
    # Printable text only: in spaces between the parts of JSON a random model would go on for ever,
    # and bytes that are no text depend on how a stream is cut.
    bias = {str(token): -100 for token in range(94, VOCAB_SIZE)}
    bias |= {str(end): 6, str(EOS_TOKEN_ID): 0}
    body = {
        "model": str(tiny_model), "messages": [{"role": "user", "content": "some words"}],
        "max_tokens": 200, "temperature": 1.0, "seed": 1, **asked,
        "logit_bias": bias,
    }  # fmt: skip
    undrafted = body | {"vllm_xargs": {"medusa": '{"enabled": false}'}}
    name = "vllm:spec_decode_num_draft_tokens_total"
    before = server.counter(name)
    expected = chat_message(server, undrafted, stream)
    assert server.counter(name) == before
    found = chat_message(server, body, stream)
    assert server.counter(name) > before
    assert found == expected
    reasoning, tool, answer = found
    assert reasoning
    assert tool == ("say" if "tools" in asked else "")
    assert WORD_PATTERN.fullmatch(json.loads(answer)["word"])


def chat_message(server: Server, body: dict[str, Any], stream: bool) -> tuple[str, str, str]:
    """Reasoning, name of the tool called first, and its arguments or the content."""
    answer = server.post("/v1/chat/completions", body | {"stream": stream})
    if stream:
        lines = answer.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        parts = [choice["delta"] for event in events for choice in event["choices"]]
    else:
        parts = [json.loads(answer)["choices"][0]["message"]]
    calls = [
        call["function"]
        for part in parts
        for i, call in enumerate(part.get("tool_calls") or ())
        if call.get("index", i) == 0
    ]
    return (
        "".join(part.get("reasoning") or "" for part in parts),
        "".join(call.get("name") or "" for call in calls),
        "".join(call.get("arguments") or "" for call in calls)
        + "".join(part.get("content") or "" for part in parts),
    )


def test_help_shows_our_flags() -> None:
    output = subprocess.run(
        [VLLM, "serve", "--help=all"], capture_output=True, text=True, env=environment(), check=True
    ).stdout
    for flag in ("--speculative-model", "--medusa-heads", "--medusa-tree", "--medusa-acceptance"):
        assert flag in output
    assert "LOSSY" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speculative-model", "medusa"], "no Medusa heads were named"),
        (
            [
                "--speculative-model",
                "medusa",
                "--medusa-heads",
                "HEADS",
                "--medusa-tree",
                "[[0,0]]",
            ],
            r"path [0, 0] has no parent",
        ),
        (
            ["--speculative-model", "medusa", "--medusa-heads", "HEADS", "--kv-cache-dtype", "fp8"],
            "does not support yet: kv_cache_dtype=fp8",
        ),
        (["--medusa-heads", "HEADS"], "needs --speculative-model medusa"),
    ],
    ids=["no-heads", "bad-tree", "fp8", "no-effect"],
)
def test_a_start_that_cannot_work_ends_with_the_reason(
    tiny_model: Path, random_heads: Path, flags: list[str], message: str
) -> None:
    command = serve_command(tiny_model, *(f.replace("HEADS", str(random_heads)) for f in flags))
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=START_SECONDS,
        check=False,
    )
    assert result.returncode != 0
    assert message in result.stdout + result.stderr
