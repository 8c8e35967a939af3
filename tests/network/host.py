"""A host of the bench: the first process of own namespaces, which starts and signals processes when it is told to.

    python host.py NAME ADDRESS HOSTS_FILE CONTROL      (CONTROL: the descriptor of a Unix socket, one JSON a packet)

The host has an own network (a tap device named eth0, whose descriptor goes out over CONTROL, and loopback), host name,
process numbers, /dev/shm and shared memory. It and every process on it die with the process that started it.
"""

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWPID, _CLONE_NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 29, 1 << 30
_MS_REC, _MS_PRIVATE, _MS_BIND = 1 << 14, 1 << 18, 1 << 12
_PR_SET_PDEATHSIG = 1
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFHWADDR = 0x8913, 0x8914, 0x8916, 0x891C, 0x8924
_IFF_UP, _ARPHRD_ETHER = 1, 1
_PACKET = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def main(name: str, address: str, hosts_file: str, control: int) -> int:
    """Run the host until its control socket closes or its starter dies."""
    _die_with_parent()
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET))
    first = os.fork()
    if first:
        os.close(control)
        return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    _die_with_parent()
    _own_files(hosts_file)
    socket.sethostname(name)
    channel = socket.socket(fileno=control)
    device = _network(address)
    socket.send_fds(channel, [json.dumps({"up": name}).encode()], [device])
    os.close(device)
    _serve(channel)
    return 0


def _serve(channel: socket.socket) -> None:
    """Do what the packets say, and tell of every process that has ended."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    started: dict[int, subprocess.Popen[bytes]] = {}
    while True:
        ready, _, _ = select.select([channel.fileno(), reader], [], [])
        if reader in ready:
            os.read(reader, 4096)
            for pid, code in _reaped():
                process = started.pop(pid, None)
                if process is not None:
                    process.returncode = code  # it has been waited for
                    channel.send(json.dumps({"ended": pid, "code": code, "at": time.monotonic()}).encode())
        if channel.fileno() in ready:
            packet = channel.recv(_PACKET)
            if not packet:
                return
            request = json.loads(packet)
            if "signal" in request:
                _signal(request["pid"], request["signal"])
                channel.send(json.dumps({"signalled": request["pid"]}).encode())
            else:
                process = _start(request)
                started[process.pid] = process
                channel.send(json.dumps({"started": process.pid}).encode())


def _start(request: dict[str, Any]) -> "subprocess.Popen[bytes]":
    with open(request["output"], "ab") as output:
        return subprocess.Popen(
            request["command"],
            env=request["environment"],
            cwd=request["folder"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)  # -1: every process but this one
    except ProcessLookupError:
        return


def _reaped() -> list[tuple[int, int]]:
    """(pid, exit code) of those that have ended, also of orphans."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def _own_files(hosts_file: str) -> None:
    """An own /proc, an own /dev/shm, and names for the other hosts."""
    _mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE)
    _mount(b"proc", b"/proc", b"proc", 0)
    _mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0)
    os.chmod("/dev/shm", 0o1777)
    _mount(hosts_file.encode(), b"/etc/hosts", None, _MS_BIND)


def _network(address: str) -> int:
    """Bring loopback and eth0 up; the descriptor through which eth0's frames go."""
    if os.path.exists("/proc/sys/net/ipv6/conf/all/disable_ipv6"):
        with open("/proc/sys/net/ipv6/conf/all/disable_ipv6", "w") as file:
            file.write("1")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    packed = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        mac = bytes([2, 0, *packed])
        fcntl.ioctl(handle, _SIOCSIFHWADDR, struct.pack("16sH6s8x", b"eth0", _ARPHRD_ETHER, mac))
        for request, value in ((_SIOCSIFADDR, packed), (_SIOCSIFNETMASK, b"\xff\xff\xff\0")):
            fcntl.ioctl(handle, request, struct.pack("16sHH4s8x", b"eth0", socket.AF_INET, 0, value))
        for interface in (b"lo", b"eth0"):
            asked = fcntl.ioctl(handle, _SIOCGIFFLAGS, struct.pack("16sH14x", interface, 0))
            flags = struct.unpack("16sH14x", asked)[1] | _IFF_UP
            fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sH14x", interface, flags))
    return device


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int) -> None:
    _check(_libc.mount(source, target, kind, ctypes.c_ulong(flags), None))


def _die_with_parent() -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
