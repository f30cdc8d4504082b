"""The kernel's own TCP over a link of ours, to compare the model with: `netem check` as root.

Two processes, each in a network namespace of its own that holds nothing but a TUN device (and for
the second comparison one end of a veth pair). What one kernel sends comes out of its TUN as
packets; `_Path` reads them, keeps them for as long as a drop-tail queue, a rate and a delay say,
and writes them into the other one's. So everything in between is ours, and everything above it is
the kernel's: a transfer over it is what `predict` claims to know.

    completion   of a transfer, this kernel against `predict`
    tbf          the rate that the kernel's own shaper gives, against the same arithmetic

Needs root and Linux; tbf needs iproute2 and the kernel's module. What is missing is said by name,
and skipped. Namespaces and devices end with their processes: nothing of this machine is changed.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from statistics import median
from typing import Any

from pddrt.alarm import attentive
from pddrt.env import Timer, WallEnv, machine_time
from pddrt.errors import CannotRun
from pddrt.netem.check import Check, Progress, skipped
from pddrt.netem.predict import Path, Transfer, predict
from pddrt.netem.segments import MSS
from pddrt.trace import Trace
from pddrt.types import MS, SECOND, Ns

_NEW_NET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C
_IFF_UP = 1
_BUFFER = 4 << 20
_HEADERS = 52
"""IP and TCP with time stamps, of a segment in a TUN; Ethernet adds 14 to them."""
_A, _B = "10.77.0.1", "10.77.0.2"
_DEADLINE = 60.0


# -- inside a namespace ----------------------------------------------------------------------------


def _interface(name: str, request: int, rest: bytes) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return fcntl.ioctl(sock, request, struct.pack("16s", name.encode()) + rest.ljust(24, b"\0"))


def _address(name: str, text: str) -> None:
    """Gives a device an address in a /24, and switches it on."""
    for request, value in ((_SIOCSIFADDR, text), (_SIOCSIFNETMASK, "255.255.255.0")):
        _interface(name, request, struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(value)))
    flags = struct.unpack_from("H", _interface(name, _SIOCGIFFLAGS, b""), 16)[0]
    _interface(name, _SIOCSIFFLAGS, struct.pack("H", flags | _IFF_UP))


def _tun() -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"pd0", _IFF_TUN | _IFF_NO_PI))
    return fd


def _socket(control: str) -> socket.socket:
    sock = socket.socket()
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    sock.settimeout(_DEADLINE)
    return sock


class _Inside:
    """What a process in its namespace does when it is told to; each method answers."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._server: socket.socket | None = None

    def tun(self, address: str) -> None:
        fd = _tun()
        _address("pd0", address)
        socket.send_fds(self._orders, [b"f"], [fd])
        os.close(fd)

    def device(self, name: str, address: str) -> None:
        _address(name, address)

    def listen(self, address: str, control: str) -> int:
        self._server = _socket(control)
        self._server.bind((address, 0))
        self._server.listen()
        port: int = self._server.getsockname()[1]
        return port

    def receive(self, total: int) -> list[list[int]]:
        """When how many bytes had come, every so often."""
        assert self._server is not None
        sock, _ = self._server.accept()
        sock.settimeout(_DEADLINE)
        found: list[list[int]] = []
        size = 0
        buffer = bytearray(256 << 10)
        with sock:
            while size < total:
                n = sock.recv_into(buffer)
                if not n:
                    break
                size += n
                now = machine_time()
                if not found or size >= total or now - found[-1][0] >= MS:
                    found.append([now, size])
        self._server.close()
        return found

    def send(self, address: str, port: int, total: int, control: str) -> int:
        """When it began to connect."""
        with _socket(control) as sock:
            begun = machine_time()
            sock.connect((address, port))
            sock.sendall(bytes(total))
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)  # until the other side has closed
        return begun


def _main(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with socket.socket(fileno=fd) as orders:
        if libc.unshare(_NEW_NET):
            orders.sendall(_line({"error": os.strerror(ctypes.get_errno())}))
            return
        _interface("lo", _SIOCSIFFLAGS, struct.pack("H", _IFF_UP))
        with suppress(OSError), open("/proc/sys/net/ipv4/tcp_no_metrics_save", "w") as file:
            file.write("1")  # of this namespace: a window is not to be remembered
        inside = _Inside(orders)
        orders.sendall(_line({"answer": None}))
        with orders.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                what, *words = json.loads(line)
                try:
                    said = {"answer": getattr(inside, what)(*words)}
                except OSError as error:
                    said = {"error": f"{what}: {error}"}
                orders.sendall(_line(said))


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


# -- outside ---------------------------------------------------------------------------------------


class _Side:
    """One such process, seen from here."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair()
        self._orders.settimeout(_DEADLINE)
        command = [sys.executable, "-m", "pddrt.netem.kernel", str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._rest = b""
        self.hear()

    def order(self, what: str, *words: object) -> None:
        self._orders.sendall(_line([what, *words]))

    def hear(self) -> Any:
        """The answer. Raises CannotRun."""
        while b"\n" not in self._rest:
            data = self._orders.recv(1 << 16)
            if not data:
                raise CannotRun("a process in its own network namespace went away")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        said = json.loads(line)
        if "error" in said:
            raise CannotRun(said["error"])
        return said["answer"]

    def ask(self, what: str, *words: object) -> Any:
        self.order(what, *words)
        return self.hear()

    def tun(self, address: str) -> int:
        self.order("tun", address)
        _, (fd, *_), _, _ = socket.recv_fds(self._orders, 1, 1)
        self.hear()
        os.set_blocking(fd, False)
        return fd

    def close(self) -> None:
        self._orders.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def _sides() -> Iterator[tuple[_Side, _Side]]:
    made: list[_Side] = []
    try:
        made += [_Side()]
        made += [_Side()]
        yield made[0], made[1]
    finally:
        for side in made:
            side.close()


class _Path:
    """One direction: packets of one TUN, kept for their time, into the other. By absolute
    deadlines."""

    def __init__(
        self, env: WallEnv, rate: int, delay: Ns, queue: int, source: int, sink: int
    ) -> None:
        """`rate` of packets with their headers; `queue` in bytes of them."""
        self._env = env
        self._rate = rate
        self._delay = delay
        self._queue = queue
        self._source = source
        self._sink = sink
        self._through: Ns = 0  # when the last packet has left the queue
        self._line: deque[tuple[Ns, bytes]] = deque()
        self._timer: Timer | None = None
        env.loop.add_reader(source, self._read)

    def _read(self) -> None:
        rate, now = self._rate, self._env.now()
        for _ in range(256):
            try:
                packet = os.read(self._source, 65536)
            except BlockingIOError:
                break
            backlog = max(0, self._through - now) * rate // SECOND
            if backlog + len(packet) > self._queue:
                continue
            self._through = max(self._through, now) + len(packet) * SECOND // rate
            self._line.append((self._through + self._delay, packet))
        self._arm()

    def _arm(self) -> None:
        if self._line and self._timer is None:
            self._timer = self._env.call_at(self._line[0][0], self._write)

    def _write(self) -> None:
        self._timer = None
        limit = self._env.now()
        while self._line and self._line[0][0] <= limit:
            with suppress(OSError):  # the kernel's own queue is full: a drop like any other
                os.write(self._sink, self._line.popleft()[1])
        self._arm()

    def close(self) -> None:
        self._env.loop.remove_reader(self._source)
        if self._timer is not None:
            self._timer.cancel()


async def _transfer(
    sender: _Side, receiver: _Side, total: int, control: str, where: str
) -> tuple[Ns, list[list[int]]]:
    """When it began, and when how many bytes had come; while this loop goes on."""
    port = receiver.ask("listen", where, control)
    receiver.order("receive", total)
    sender.order("send", where, port, total, control)
    arrivals = await asyncio.to_thread(receiver.hear)
    begun = await asyncio.to_thread(sender.hear)
    if not arrivals or arrivals[-1][1] < total:
        raise CannotRun(f"a transfer by the kernel's {control} broke off")
    return begun, arrivals


async def _over_tun(queue: int, total: int, control: str) -> Ns:
    """How long this kernel takes for it, from the first SYN to the last byte."""
    with _sides() as (a, b):
        fds = a.tun(_A), b.tun(_B)
        env = WallEnv(0, Trace())
        ways = [_Path(env, RATE, DELAY, queue, *pair) for pair in (fds, fds[::-1])]
        try:
            begun, arrivals = await _transfer(a, b, total, control, _B)
        finally:
            for way in ways:
                way.close()
            for fd in fds:
                os.close(fd)
    return arrivals[-1][0] - begun


def _ip(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotRun(f"{' '.join(words[4:7])}: {done.stderr.strip() or 'failed'}")


async def _over_tbf(rate: int, total: int) -> float:
    """Bytes of payload a second behind the kernel's own token bucket."""
    with _sides() as (a, b):
        into = ["nsenter", "-t", str(a.process.pid), "-n"]  # not even for a moment in our own
        peer = ["peer", "name", "pd1", "netns", str(b.process.pid)]
        _ip(*into, "ip", "link", "add", "pd0", "type", "veth", *peer)
        a.ask("device", "pd0", _A)
        b.ask("device", "pd1", _B)
        shape = ["rate", f"{rate * 8}bit", "burst", "32kb", "limit", "1mb"]
        _ip(*into, "tc", "qdisc", "add", "dev", "pd0", "root", "tbf", *shape)
        _, arrivals = await _transfer(a, b, total, "cubic", _B)
    ended, size = arrivals[-1]
    begun, before = next(one for one in arrivals if 4 * one[1] >= size)
    return (size - before) * SECOND / (ended - begun)


# -- the list --------------------------------------------------------------------------------------

RATE = 12_500_000
DELAY: Ns = 20 * MS
LIMITS = {"cubic": 4.0, "reno": 4.0, "bbr": 6.0}
"""Per cent of a completion time; one more each than the model's own tests allow for a median of
runs, for a machine that also has to move every packet through a program."""


def _missing(*programs: str) -> str:
    if not sys.platform.startswith("linux"):
        return "this is no Linux"
    if os.geteuid():
        return "needs root"
    if not os.path.exists("/dev/net/tun"):
        return "/dev/net/tun is missing"
    absent = [program for program in programs if shutil.which(program) is None]
    return f"{', '.join(absent)} not found" if absent else ""


def checks(quick: bool, progress: Progress) -> list[Check]:
    """This kernel's TCP against the model, and its shaper against arithmetic."""
    total, runs = (5_000_000, 1) if quick else (20_000_000, 3)
    found = []
    for control in ("cubic",) if quick else ("cubic", "reno", "bbr"):
        name = f"kernel's {control}, {total / 1e6:g} MB over 100 Mbit/s, 20 ms"
        progress(name)
        found.append(_tried(name, _missing(), partial(_completion, name, control, total, runs)))
    name = "kernel's tbf, 100 Mbit/s"
    progress(name)
    why = _missing("ip", "tc", "nsenter")
    found.append(_tried(name, why, partial(_shaper, name, total)))
    return found


def _tried(name: str, missing: str, measure: Callable[[], Check]) -> Check:
    if missing:
        return skipped(name, missing)
    try:
        return measure()
    except (CannotRun, OSError) as error:
        return skipped(name, str(error))


def _loop() -> asyncio.Runner:
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def _completion(name: str, control: str, total: int, runs: int) -> Check:
    queue = 2 * RATE * DELAY // SECOND
    path = Path(RATE, DELAY, queue, 0.0, None, _HEADERS)
    transfer = Transfer(total, 0, control)  # type: ignore[arg-type]
    planned = predict(path, [transfer], seed=0).ends[0]
    with attentive(), _loop() as runner:
        took = [runner.run(_over_tun(queue, total, control)) for _ in range(runs)]
    middle = median(took)
    error = abs(middle / planned - 1) * 100
    spread = f"{min(took) / SECOND:.3f} to {max(took) / SECOND:.3f} s" if runs > 1 else ""
    measured = f"{middle / SECOND:.3f} s"
    limit = LIMITS[control]
    return Check(name, f"{planned / SECOND:.3f} s", measured, round(error, 3), limit, "%", spread)


def _shaper(name: str, total: int) -> Check:
    planned = RATE * MSS / (MSS + _HEADERS + 14)
    with attentive(), _loop() as runner:
        got = runner.run(_over_tbf(RATE, total))
    error = abs(got / planned - 1) * 100
    about = (f"{planned / 1e6:.4g} MB/s", f"{got / 1e6:.4g} MB/s")
    return Check(name, *about, round(error, 3), 1.0, "%", "payload; its shaper, not ours")


if __name__ == "__main__":
    _main(int(sys.argv[1]))
