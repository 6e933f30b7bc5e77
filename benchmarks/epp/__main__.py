"""`make bench-epp`: the CPU of a request at the endpoint picker, over that of an external processor that only
sends everything back.

Both are processes of their own with the same gRPC library, message classes and number of messages; a third
plays Envoy. Windows of the two alternate; CPU is that of all threads of the process, a request of a window;
ratios are those of the medians.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.contestant import Process, parser
from benchmarks.epp.player import AT_ONCE, CONVERSATIONS, ENGINES, SIZES

from sumibi.bench import report
from sumibi.engine.fetch import DEFAULT_MODEL, ensure_model

AT_MOST = 1.5
ROOT = Path(__file__).parents[2]
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid):
    """CPU that a process has used, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def busy_s():
    """CPU that everybody has used, of all cores."""
    user, nice, system, *_rest = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return (int(user) + int(nice) + int(system)) / _TICKS


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """One side."""

    def __init__(self, name, words, environment):
        self.name, self.port = name, free_port()
        words = [sys.executable, "-m", *(word.replace("@PORT@", str(self.port)) for word in words)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(words, env=environment, stdout=self._log, stderr=self._log)
        self.us = {}
        """Microseconds of CPU a request, by (kind, phase): one of each window."""

    @property
    def cpu_s(self):
        return cpu_s(self._process.pid)

    def wait(self):
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        self._log.seek(0)
        raise SystemExit(f"{self.name} did not start: {self._log.read().decode()[-2000:]}")

    def close(self):
        self._process.kill()
        self._process.wait()


def options_given() -> argparse.Namespace:
    known = parser("epp", __doc__)
    known.add_argument("--dur", type=float, default=2.0, help="seconds of a window")
    known.add_argument(
        "--package", type=Path, default=Path("src"), help="ours: `make compiled`'s directory, or src"
    )
    options = known.parse_args()
    options.cmd = "make bench-epp"
    if (options.rounds, options.dur) != (known.get_default("rounds"), known.get_default("dur")):
        options.cmd += f" (with --rounds {options.rounds} --dur {options.dur:g})"
    return options


def main():
    """Measure, print, write."""
    options = options_given()
    cmd = options.cmd
    package = options.package.resolve()
    compiled = bool(list((package / "sumibi" / "routing").glob("router.*.so")))
    figures = [report.machine(), report.statement("command", cmd)]
    servers, others, failed, done = [], [], 0, 0
    with tempfile.TemporaryDirectory() as scratch, Process("player", player_words()) as player:
        environment = {**os.environ, "PYTHONPATH": f"{package}:{ROOT}", "XDG_STATE_HOME": scratch}
        ports = player.ask(None)
        try:
            for phase in ("on", "off"):
                servers.append((phase, *start(phase, ports, environment)))
            for _, *both in servers:
                for server in both:
                    server.wait()
            for _ in range(10):
                player.ask(None)  # the pickers look at the engines
            for round_number in range(options.rounds + 1):
                for kind in SIZES:
                    for phase, *both in servers:
                        for server in both if round_number % 2 else reversed(both):
                            before, all_before, begun = server.cpu_s, busy_s(), time.monotonic()
                            player_before = cpu_s(player.pid)
                            task = {"port": server.port, "kind": kind, "phase": phase}
                            told = player.ask({**task, "seconds": options.dur if round_number else 0.5})
                            failed += told["failed"]
                            done += told["done"]
                            spent = server.cpu_s - before
                            rest = busy_s() - all_before - spent - (cpu_s(player.pid) - player_before)
                            others.append(rest / (time.monotonic() - begun))
                            if round_number and told["done"]:
                                server.us.setdefault((kind, phase), []).append(1e6 * spent / told["done"])
            about = player.about
        finally:
            for _, *both in servers:
                for server in both:
                    server.close()
    figures += [
        report.statement(
            "workload",
            f"chats, {CONVERSATIONS} of each size again and again, {AT_ONCE} at once, {ENGINES} endpoints; "
            "response phase on: headers and one JSON piece, or 20 events; windows of "
            f"{options.dur:g} s, {options.rounds} of each kind after one that is not counted",
        ),
        report.statement(
            "sumibi",
            f"{'compiled' if compiled else 'not compiled'}, `sumibi epp`, policy cost, exact keys, tokenizer "
            f"{DEFAULT_MODEL}, no TLS, no KV events",
        ),
        report.statement("echo", f"grpc.aio with reads and writes, {about}, the same classes, uvloop"),
        report.statement(
            "cores used by others",
            f"{statistics.median(others):.0%}, median of windows: what switches between them counts as ours",
        ),
        report.figure("requests answered", [done], "", cmd=cmd),
        report.figure("failed requests", [failed], "", at_most=0, cmd=cmd),
    ]
    for phase, ours, echo in servers:
        for kind in SIZES:
            mine, bare = ours.us[kind, phase], echo.us[kind, phase]
            name = f"{kind}, response phase {phase}"
            base = statistics.median(bare)
            figures += [
                report.figure(f"{name}: CPU a request", mine, "µs", cmd=cmd),
                report.figure(f"{name}: CPU of the echo", bare, "µs", cmd=cmd),
                report.figure(
                    f"{name}: ours / echo",
                    [one / base for one in mine],
                    "x",
                    at_most=AT_MOST,
                    baseline=base,
                    cmd=cmd,
                ),
            ]
    sys.exit(report.finish(figures, options.json, options.results, "The endpoint picker beside an echo"))


def player_words():
    return [sys.executable, "-m", "benchmarks.epp.player"]


def start(phase, ports, environment):
    """Ours and the echo."""
    word = "auto" if phase == "on" else "off"
    ours = ["sumibi", "epp", "--no-secure-serving", "--host", "127.0.0.1", "--grpc-port", "@PORT@"]
    ours += ["--grpc-health-port", str(free_port()), "--metrics-port", str(free_port())]
    ours += ["--tokenizer", str(ensure_model(DEFAULT_MODEL)), "--response-phase", word]
    ours += ["--engine", ",".join(f"http://127.0.0.1:{port}" for port in ports)]
    echo = ["benchmarks.epp.echo", "--port", "@PORT@", "--response-phase", word]
    return Server("ours", ours, environment), Server("echo", echo, environment)


if __name__ == "__main__":
    main()
