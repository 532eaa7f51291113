"""The server as a process: signals, killed stages, killed parent, wrong starts."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.servers import Server, gone_within, serving

pytestmark = pytest.mark.slow
SLOW = ("--set", "stages.thinker.step_delay_s=0.03")


def ask(server: Server, text: str, timeout: float = 30) -> httpx.Response:
    body = {"model": "echo3", "messages": [{"role": "user", "content": text}]}
    return httpx.post(server.address + "/v1/chat/completions", json=body, timeout=timeout)


def wait_running(server: Server, count: int) -> None:
    """Returns when so many requests run."""
    deadline = time.monotonic() + 20
    while f"omnistage_requests_running {count}.0" not in server.get("/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def content(response: httpx.Response) -> str:
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def decode_something(server: Server) -> None:
    """Starts a decoder process."""
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"no sound").decode(), "format": "wav"}}
    body = {"model": "echo3", "messages": [{"role": "user", "content": [part]}]}
    assert httpx.post(server.address + "/v1/chat/completions", json=body, timeout=30).status_code == 415


@pytest.mark.parametrize("everywhere", [False, True], ids=["parent", "whole service"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_finishes_work_in_flight_and_exits_zero_leaving_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, everywhere: bool
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with serving(tmp_path, "echo3", *SLOW) as server, ThreadPoolExecutor(8) as pool:
        decode_something(server)
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert any("omnistage.media.child" in child.cmdline() for child in children)
        answers = [pool.submit(ask, server, f"finish {i} " * 5) for i in range(8)]
        wait_running(server, 8)
        for pid in [server.process.pid] + [child.pid for child in children] * everywhere:
            os.kill(pid, number)
        assert [content(a.result()) for a in answers] == [f"finish {i} " * 5 for i in range(8)]
        assert server.process.wait(10) == 0
        gone_within(children, 2)
        with pytest.raises(httpx.ConnectError):
            server.get("/live")
        assert "Traceback" not in server.log.read_text()
        assert list(scratch.iterdir()) == []


def test_a_terminal_signals_the_server_alone(tmp_path: Path) -> None:
    with serving(tmp_path, "echo3") as server:
        decode_something(server)
        children = psutil.Process(server.process.pid).children(recursive=True)
        groups = {os.getpgid(child.pid) for child in children}
        assert len(children) >= 4
        assert os.getpgid(server.process.pid) not in groups


def test_second_signal_stops_now(tmp_path: Path) -> None:
    with serving(tmp_path, "echo3", "--set", "stages.thinker.step_delay_s=1") as server, ThreadPoolExecutor(1) as pool:
        children = psutil.Process(server.process.pid).children(recursive=True)
        answer = pool.submit(ask, server, "this would take minutes " * 20)
        time.sleep(0.3)
        os.kill(server.process.pid, signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(10) == 130
        gone_within(children, 8)
        with pytest.raises(httpx.HTTPError):
            answer.result().raise_for_status()


def test_killed_parent_leaves_no_process_and_the_port_is_free(tmp_path: Path) -> None:
    with serving(tmp_path, "echo3", *SLOW) as server, ThreadPoolExecutor(1) as pool:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) == 5  # three stages, two media decoders
        answer = pool.submit(ask, server, "cut off " * 40)
        time.sleep(0.3)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(5)
        gone_within(children, 2)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", int(server.address.rpartition(":")[2])))
        with pytest.raises(httpx.HTTPError):
            answer.result()


@pytest.mark.parametrize("stage", ["thinker", "talker", "wave"])
def test_killed_stage_turns_ready_false_then_true_and_others_finish(tmp_path: Path, stage: str) -> None:
    with serving(tmp_path, "echo3", *SLOW) as server, ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(ask, server, f"text only {i} " * 4) for i in range(12)]
        wait_running(server, 12)
        os.kill(server.stage_pid(stage), signal.SIGKILL)
        assert server.until(False, 1) < 1
        assert server.get("/health").status_code == 503
        assert server.until(True, 3) < 3
        texts = [a.result() for a in answers]
        assert content(ask(server, "afterwards")) == "afterwards"
    if stage == "thinker":  # whole answers: nothing was sent yet, so all are replayed
        assert [r.status_code for r in texts] == [200] * 12
    assert [content(r) for r in texts] == [f"text only {i} " * 4 for i in range(12)]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "omnistage", *arguments], capture_output=True, text=True, timeout=30, check=False
    )


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("serve", "echo9"), "echo9"),
    (("serve", "echo3", "--deploy", "nowhere.yaml"), "nowhere.yaml"),
    (("serve", "echo3", "--set", "stages.wave.thread=1"), "threads"),
    (("serve", "echo3", "--set", "stages.wav.threads=1"), "wave"),
    (("serve", "echo3", "--set", "limits.max_queue=-1"), "limits.max_queue"),
    (("serve", "echo3", "--set", "dtype=int3"), "dtype"),
    (("serve", "echo3", "--set", "nonsense"), "KEY=VALUE"),
    (("serve", "echo3", "--set", "arena_mb=99999999"), "arena_mb"),
    (("serve", "echo3", "--set", "variant=other"), "default"),
    (("generate", "echo3", "--requests", "nowhere.jsonl", "--out", "x"), "nowhere.jsonl"),
    (("config", "show", "echo3", "--set", "sampling.thinker.top_p=2"), "top_p"),
]


@pytest.mark.parametrize(("arguments", "named"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_wrong_start_exits_promptly_with_one_line_that_names_it(arguments: tuple[str, ...], named: str) -> None:
    result = command(*arguments)
    assert result.returncode == 1
    assert named in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = command("serve", "echo3", "--port", port)
    assert result.returncode == 1
    assert f"--port {port}" in result.stderr.strip().splitlines()[-1]


def test_failing_stage_ends_the_start_with_its_cause_in_the_last_line() -> None:
    faults = '[{"point": "engine_built", "action": "raise"}]'
    started = time.monotonic()
    result = command("serve", "echo3", "--port", "0", "--set", f"stages.talker.faults={faults}")
    assert result.returncode == 1
    assert "stage talker did not start: InjectedFault" in result.stderr.strip().splitlines()[-1]
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("arguments", [("--help",), ("serve", "--help"), ("config", "show", "echo3"), ("models",)])
def test_help_and_config_commands_import_no_torch(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        "from omnistage.entrypoints.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(sorted(m for m in ('torch', 'transformers', 'diffusers', 'numpy.f2py') if m in sys.modules))\n"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert result.stdout.strip().splitlines()[-1] == "[]"
