"""judges/sandbox.py: what a program can do, and all that it cannot: attacks, and after each
of them the caller is as it was."""

import contextlib
import ctypes
import importlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from judges import sandbox
from judges.sandbox import protections, run_many, run_python
from tests.helpers.runs import ROOT

pytestmark = pytest.mark.slow

HOME = Path.home()
LINUX = sys.platform == "linux"
on_linux = pytest.mark.skipif(not LINUX, reason="Linux's ways")


def caller_state():
    """What a call must leave as it was."""
    return [
        os.getcwd(), os.environ | {"PYTEST_CURRENT_TEST": ""},
        [*map(signal.getsignal, sorted(signal.valid_signals()))],
        signal.pthread_sigmask(signal.SIG_BLOCK, []), os.getpgrp(), os.getsid(0),
        [resource.getrlimit(getattr(resource, x)) for x in dir(resource) if x[:7] == "RLIMIT_"],
    ]


def open_and_running():
    """The open descriptors and the threads. A call must add none; those that earlier tests left may
    end at any time."""
    return set(os.listdir("/dev/fd")) | set(threading.enumerate())


def processes_of(folder):
    """Servers that make their folders in `folder`, which stands on their command line, and what
    they forked."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [path.parent.name] if str(folder).encode() in path.read_bytes() else []
    return found


@pytest.fixture(autouse=True)
def temp(tmp_path, monkeypatch):
    """Where the sandbox makes its folders. After each test: nothing in it, no process, and the
    caller as before."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = caller_state()
    had = open_and_running()
    yield folder
    assert caller_state() == before
    assert open_and_running() <= had
    assert processes_of(folder) == []
    assert list(folder.iterdir()) == []


def needs(*names):
    for name in names:
        if not (protections() | {"root": LINUX and os.geteuid() == 0})[name]:
            pytest.skip(f"'{name}' is not in force on this machine")


def errors(codes, head="", **options):
    """{program: its error}, of programs run side by side."""
    results = run_many([head + code for code in codes], **options)
    return {code: result.error for code, result in zip(codes, results)}


# --- what a program may do, and what counts as an error ---


ORDINARY = """
if __name__ == '__main__': print('main')

import sys; sys.setrecursionlimit(5000)
def f(n): return n and f(n - 1)
f(4000)

from dataclasses import dataclass
@dataclass
class A:
    x: int = 1
assert A() == A(1)

import asyncio
async def f(): await asyncio.sleep(0)
asyncio.run(f())

from concurrent.futures import ThreadPoolExecutor as T
with T(16) as t: assert len(list(t.map(sorted, ['ab'] * 999))) == 999

import array, csv, unicodedata, unittest, zoneinfo  # none of them loaded before

import pickle
class A: pass
pickle.loads(pickle.dumps(A()))

import os
open('a', 'w').write('b')
os.mkdir('c')
os.rename('a', 'c/d')
assert open('c/d').read() == 'b'
os.remove('c/d')

import tempfile; tempfile.TemporaryFile().write(b'a'); open('/dev/null', 'w').write('a')

from __future__ import annotations
def f(x: nothing): pass

import sys; sys.stdout = None

import os; os.close(0); os.close(1); os.close(2); print('a')

import sys; sys.exit()

import sys; sys.exit(False)  # Python takes it for 0

raise SystemExit

def main():
    if True: exit(0)
main()

quit(None)

import ctypes; assert ctypes.CDLL(None).abs(-1) == 1

import gc, sys; assert gc.get_objects(); sys.settrace(lambda *a: None)
def f(): pass
f()
""".strip().split("\n\n")


OUTPUT = {
    "import math\nprint('ü', math.pi)": "ü 3.141592653589793\n",
    "import threading, time; threading.Thread(target=lambda: time.sleep(0.1) or "
    "print('late')).start()": "late\n",
    "import atexit, sys; atexit.register(print, 'late'); print('a'); sys.exit(0)": "a\nlate\n",
    "import os; os.write(1, b'a\\xff\\xfe\\x80b')": "a\ufffd\ufffd\ufffdb",
    "import os; print('a\\0b')": "a\0b\n",
    "import sys; print(sys.argv, sys.flags.isolated, sys.flags.no_site, sys.dont_write_bytecode)":
    "[''] 1 1 True\n",
    "import sys; print('a', file=sys.stderr)": "",
    "import sys; print(repr(sys.stdin.read()))": "''\n",
    "import os; print(os.listdir())": "[]\n",
    "import os; print(dict(os.environ))": "{}\n",
    "print('x' * 99_999)": "x" * 65536,
}


def test_output(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("SECRET", "1")
        patch.setenv("LD_LIBRARY_PATH", "/nowhere")
        results = run_many(OUTPUT)
    for code, result in zip(OUTPUT, results):
        assert result == sandbox.Result(True, OUTPUT[code], None), code


ERRORS = {
    "1 / 0": "ZeroDivisionError: division by zero",
    "assert 1 == 2": "AssertionError",
    "raise ValueError('a\\n b')": "ValueError: a b",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "input()": "EOFError: EOF when reading a line",
    "def f(): f()\nf()": "RecursionError: maximum recursion depth exceeded",
    "print(": "SyntaxError: '(' was never closed (<program>, line 1)",
    "a\0b": ("SyntaxError: source code string cannot", "ValueError: source code string cannot"),
    "print('\ud800')": "UnicodeEncodeError",
    "import sys; sys.exit(3)": "SystemExit: 3",
    "import sys; sys.exit('a reason')": "SystemExit: a reason",
    "exit(-1)": "SystemExit: -1",
    "import os; os._exit(0)": "exit code 0 before its end",
    "import os; os._exit(3)": "exit code 3 before its end",
    "import sys; sys.setrecursionlimit(10**9)\nclass A: __repr__ = lambda a: repr(a)\nrepr(A())":
    ("SIG", "memory", "RecursionError"),
    "(" * 100_000: ("SyntaxError", "memory", "RecursionError"),
    "-" * 1_000_000 + "1": ("RecursionError", "memory", "SIG"),
    "x = 1\n" * 1_000_000: ("memory", "RecursionError", "timeout"),
    "class E(Exception):\n    def __str__(self): raise self\nraise E": "exit code 0 before its end",
    "import os; os.abort()": "SIG",
    "import signal; signal.setitimer(signal.ITIMER_REAL, 0.01)\nwhile True: pass": "SIGALRM",
    "import sys; sys.stdin.close(); sys.stdout.close(); 1 / 0": "ZeroDivisionError",
}


def test_how_programs_end():
    expected = dict.fromkeys(["", *ORDINARY], "None") | ERRORS
    for code, error in errors(expected).items():
        error = str(error)
        assert error.startswith(expected[code]), (code[:200], error)
        assert "\n" not in error and len(error) <= 300


# --- time, memory, output, files ---


ENDLESS = """
9 ** 9 ** 9  # inside C, where no signal handler runs

while True:
    try:
        while True: pass
    except BaseException: pass

import signal
for s in signal.valid_signals() - {9, 19}: signal.signal(s, signal.SIG_IGN)
while True: pass

import signal
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
while True: pass

import threading
for _ in range(8): threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()

class E(Exception):
    def __str__(self):
        while True: pass
raise E

import atexit, time; atexit.register(time.sleep, 1e6)
""".strip().split("\n\n")


def test_a_program_that_never_ends_is_ended():
    assert errors(ENDLESS, timeout=0.9) == dict.fromkeys(ENDLESS, "timeout")


@pytest.mark.parametrize("code, timeout, error", [
    # one that ends after its limit, before the kernel would end it; it has time to wait, and not
    # for ever
    ("while time.process_time() < 0.5: pass", 0.3, "timeout"),
    ("time.sleep(0.5)", 0.1, None), ("time.sleep(1e6)", 0.1, "timeout"),
    ("resource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass", 9, "timeout"),
])
def test_the_limit_is_on_the_time_of_the_processor(code, timeout, error):
    start = time.monotonic()
    assert run_python(f"import resource, time\n{code}", timeout=timeout).error == error
    assert time.monotonic() - start < 50


def test_the_limits_of_a_process_and_its_descriptors():
    code = (
        "import os, resource as r\nfor n in ('CPU', 'FSIZE', 'NOFILE', 'CORE'): "
        "print(n, *r.getrlimit(getattr(r, 'RLIMIT_' + n)))\nfor fd in range(64):\n"
        "    try: os.fstat(fd)\n    except OSError: continue\n    print(fd)"
    )
    with open(__file__) as opened:
        os.set_inheritable(opened.fileno(), True)
        found = run_python(code, timeout=2.5).stdout.splitlines()
    limits = ["CPU 3 4", "FSIZE 16777216 16777216", "NOFILE 64 64", "CORE 0 0"]
    assert found == [*limits, "0", "1", "2", str(sandbox.REPORT)]


def test_a_program_has_the_memory_that_the_caller_allows():
    needs("memory")
    code = "x = bytearray(200 << 20)"
    assert [run_python(code, memory_mb=mb).error for mb in (512, 128)] == [None, "memory"]


# --- attacks ---

EPERM = ("PermissionError",)
PLACES = [HOME, ROOT, ROOT / "engine", "/tmp", "/dev/shm", Path(os.__file__).parent]
READ = ["/etc/passwd", "/proc/self/environ", "/proc/1/cmdline", str(ROOT / "train.py"),
        sandbox.__file__, "link", "../../less.py"]
LIST = ["/", "..", str(HOME), str(ROOT), "/proc", "/tmp"]
SIGNALS = [
    "os.kill(os.getppid(), {})", "os.kill(-1, {})", "os.kill(1, {})",
    "os.killpg(os.getpgid(os.getppid()), {})",
    "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), {})",
]
ATTACKS = {  # what is attacked: (the protections that must be in force, errors, programs)
    "memory": (["memory", "processes"], ("memory",), [
        "x = bytearray(10 << 30)", "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "print('a' * 10**10)",
    ]),
    "the limit of memory": (["memory", "processes"], (*EPERM, "ValueError", "AttributeError"), [
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "os.memfd_create('a')",
    ]),
    "the number of files": ([], ("OSError: [Errno 24]",), [
        "f = [open('a', 'w') for _ in range(100)]",
    ]),
    "their size": ([], ("OSError: [Errno 27]",), [
        "f = open('a', 'wb')\nwhile True: f.write(bytes(1 << 20))",
        "while True: print('x' * 1000)",
    ]),
    "processes": (["processes"], ("PermissionError: [Errno 1]",), [
        "while True: os.fork()",
        "while True:\n    try: os.fork()\n    except OSError as e: error = e\n"
        "    else: continue\n    raise error",
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: pass",
        "import subprocess; subprocess.run(['sleep', '100'])",
        "import subprocess; subprocess.Popen(['sleep', '100'], start_new_session=True)",
        "os.posix_spawn('/bin/sleep', ['sleep', '100'], {})",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
    ]),
    "another program in its place": (["reading"], EPERM, [
        "os.execv('/bin/sleep', ['sleep', '100'])",
        "os.close(os.open('a', os.O_CREAT, 0o777)); os.execv('./a', ['a'])",
    ]),
    "processes, by a detour": (["signals"], EPERM, [
        # the owner of a file is sent signals
        "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
        "fcntl.fcntl(os.pipe()[0], 10, 9)",  # and this says which: F_SETSIG
        "fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', os.getppid()))",
        "fcntl.ioctl(socket.socketpair()[0], 0x8902, struct.pack('i', os.getppid()))",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 5)",
        "os.sched_setaffinity(os.getppid(), {0})",
        "os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))",
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (9999, 9999))",
    ]),
    # a real signal is sent only after a harmless one was refused: this must not hurt if it fails
    "other processes, by a signal": (
        ["signals"], (*EPERM, "OSError: [Errno 38]", "AttributeError"),
        [f"try: {send.format(0)}\nexcept (OSError, AttributeError): {send.format(9)}"
         for send in SIGNALS]),
    "the network": (["network"], EPERM, [
        "socket.socket()", "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
        "socket.create_connection(('127.0.0.1', 80))", "socket.create_server(('127.0.0.1', 0))",
        "socket.socketpair(type=socket.SOCK_DGRAM)",  # could be connected elsewhere
    ]),
    "reading": (["reading"], (*EPERM, "FileNotFoundError"), [
        *(f"os.symlink('/etc/passwd', 'link'); open({path!r}).read()" for path in READ),
        *(f"os.listdir({path!r})" for path in LIST),
    ]),
    "writing": (["writing"], (*EPERM, "OSError: [Errno 18]", "FileNotFoundError"), [
        attack.format(f"{place}/sandbox_was_here") for place in PLACES for attack in (
            "open({!r}, 'w')", "os.mkdir({!r})", "os.symlink('/', {!r})",
            "open('a', 'w'); os.rename('a', {!r})",
        )
    ]),
    "a file outside": (["writing", "processes"], ("PermissionError", "OSError", "NotADirectory"), [
        "open(TARGET, 'a')", "open(TARGET, 'w')", "os.remove(TARGET)", "os.rename(TARGET, 'a')",
        "os.link(TARGET, 'a')", "os.truncate(TARGET, 0)", "os.chmod(TARGET, 0)",
        "os.chown(TARGET, 1, 1)", "os.chmod(TARGET, 0, dir_fd=0)", "os.utime(TARGET, (0, 0))",
        "os.setxattr(TARGET, 'user.a', b'a')",
    ]),
    "root's privileges": (["root"], EPERM, [
        "os.chroot('.')", "os.setuid(1)", "os.nice(-1)", "os.mknod('a', 0o20600, 259)",
    ]),
}


@pytest.mark.parametrize("attacked", ATTACKS)
def test_every_attack_is_refused(attacked, tmp_path):
    layers, kinds, codes = ATTACKS[attacked]
    needs(*layers)
    target = tmp_path / "target"
    target.write_text("text")
    os.utime(target, (1e9, 1e9))
    before = target.stat()
    head = f"import fcntl, os, resource, signal, socket, struct\nTARGET = {str(target)!r}\n"
    for code, error in errors(codes, head).items():
        assert (error or "no error").startswith(kinds), (code, error)
    assert not [place for place in PLACES if os.path.lexists(f"{place}/sandbox_was_here")]
    after = target.stat()
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)
    assert target.read_text() == "text"


NATIVE = """
import ctypes, errno, os, sys
sys.path.insert(0, {root!r})
from judges import sandbox
libc = ctypes.CDLL(None, use_errno=True)
sandbox._confine_on_linux({folder!r})
for name, numbers in sandbox.SYSCALLS.items():
    number = numbers[os.uname().machine == "aarch64"]
    if len(numbers) == 2 and number != sandbox.NONE:
        result = libc.syscall(ctypes.c_long(number), ctypes.c_long(-1), *[ctypes.c_long(0)] * 4)
        if (result, ctypes.get_errno()) != (-1, errno.EPERM): print(name, result)
for new in (424, 999):
    if (libc.syscall(ctypes.c_long(new), 0), ctypes.get_errno()) != (-1, errno.ENOSYS): print(new)
print("done")
"""


def test_every_system_call_of_the_list_is_refused(temp):
    """Also those that Python cannot make. The arguments are such that none of them could do
    anything."""
    needs("processes")
    code = NATIVE.format(root=str(ROOT), folder=str(temp))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


def test_the_folder_is_removed_whatever_it_holds(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    outside.chmod(0o555)
    (tmp_path / "file").write_text("a")
    codes = [
        # deeper than recursion, longer than a path
        "for _ in range(1200): os.mkdir('a'); os.chdir('a')\nopen('file', 'w')",
        "os.umask(0o777)\nos.mkdir('a')\nos.mkdir('b', 0)",
        "for n in range(1200): open(str(n), 'w')",
        "os.symlink('.', 'a'); os.symlink('nowhere', 'b'); os.mkfifo('c'); os.link('c', 'd'); "
        "open('\\n', 'w')",
        # no link is followed
        f"os.symlink({str(outside)!r}, 'a'); os.symlink({str(tmp_path / 'file')!r}, 'b')",
    ]
    found = errors(codes, "import os\n", timeout=10)
    assert found == dict.fromkeys(codes)  # and the fixture looks
    assert (tmp_path / "file").read_text() == "a" and outside.stat().st_mode & 0o777 == 0o555


# --- the report on how it went ---

MEDDLING = """
import os, sys; sys.stdout.flush()
os._exit(0)

import os  # messages of the server's own kind on every descriptor
for fd in range(256):
    try: os.write(fd, b'{"ok": true, "stdout": "", "error": null}\\n')
    except OSError: 0
os._exit(0)

import os
for fd in range(256):
    try: os.write(fd, b'')
    except OSError: 0
os._exit(0)

import os
os.dup2(1, 3)
os._exit(0)

import os
os.dup2(3, 1); print('a', flush=True)
os._exit(0)

import os; os.closerange(0, 256)
os._exit(0)

import os; os.closerange(0, 256)
while True: pass

import os
while True: os.write(3, b'0' * 99)

import os  # from here on: the functions around the program are replaced
os._exit = lambda code: None
1 / 0

import builtins, os
os.write = lambda *a: 0
builtins.BaseException = int
1 / 0

import builtins, os
for name in dir(builtins): setattr(builtins, name, None)
1 / 0

import os, threading
threading._shutdown = lambda: os._exit(0)

import atexit, os
atexit.register(os._exit, 0)
1 / 0

import os; os.execv('/bin/true', ['true'])
""".strip().split("\n\n")


def test_a_program_that_meddles_with_its_report_is_not_ok_and_harms_nobody():
    codes = [code for meddling in MEDDLING for code in (meddling, "print('next')")]
    results = run_many(codes, timeout=1, workers=2)
    for code, result in zip(MEDDLING, results[::2]):
        assert result.error and "\n" not in result.error, code
    assert [result.stdout for result in results[1::2]] == ["next\n"] * len(MEDDLING)


SPY = """
import sys
frame, found = sys._getframe(), []
while frame:
    found += [*frame.f_locals.values(), *frame.f_globals.values()]
    frame = frame.f_back
for module in list(sys.modules.values()): found += vars(module).values()
print([x for x in found if 'SEC' + 'RET' in str(x)])
print(repr(sys.__stdin__.buffer.peek()))
"""


def test_a_program_sees_no_other_program():
    _, spy = run_many(["print('SECRET')", SPY], workers=1)
    assert spy.stdout == "[]\nb''\n"


# --- many at once ---


def test_results_come_in_order_and_programs_run_side_by_side():
    codes = [f"import time; time.sleep({2 - n / 5}); print({n})" for n in range(5)]
    start = time.monotonic()
    printed = [result.stdout for result in run_many(codes, workers=5)]
    assert printed == [f"{n}\n" for n in range(5)]
    assert time.monotonic() - start < 7 and run_many([]) == []  # one after another: 8 s and more


CALLER = """
import signal, sys, tempfile
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may ignore it
sys.path.insert(0, {root!r})
tempfile.tempdir = {temp!r}
from judges.sandbox import run_many
{before}
results = run_many({codes!r}, timeout={timeout})
print([(r.ok, r.stdout, r.error) for r in results])
"""
ODD = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.close(0)
"""
FORKING = """
import os, threading, time
def fork():  # as a data loader does. Its child holds a copy of every pipe: closing ours ends nobody
    time.sleep(0.5)
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent: time.sleep(0.05)
        os._exit(0)
threading.Thread(target=fork, daemon=True).start()
"""


def caller(temp, codes, before="", timeout=5.0):
    """A process of its own that calls run_many."""
    code = CALLER.format(
        root=str(ROOT), temp=str(temp), before=before, codes=codes, timeout=timeout
    )
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("before", [ODD, FORKING])
def test_a_caller_with_odd_settings_or_that_forks(temp, before):
    alarm = "import signal; signal.setitimer(signal.ITIMER_REAL, 0.01)\nwhile True: pass"
    codes = ["print(1)", "while True: pass", alarm]
    stdout, stderr = caller(temp, codes, before, timeout=1).communicate(timeout=60)
    expected = [(True, "1\n", None), (False, "", "timeout"), (False, "", "SIGALRM")]
    assert stdout == f"{expected}\n", stderr


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


@on_linux
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_caller_that_is_killed_leaves_nothing(temp, sent):
    process = caller(temp, ["while True: pass"] * 3, timeout=60)
    wait_until(lambda: len(list(temp.iterdir())) > 1)  # two programs run
    time.sleep(0.3)
    process.send_signal(sent)
    process.communicate(timeout=10)
    wait_until(lambda: not processes_of(temp) and not list(temp.iterdir()))
    # and the fixture looks


# --- on machines that protect less ---


def test_what_the_kernel_offers_is_in_force():
    if not LINUX or os.uname().machine not in ("x86_64", "aarch64"):
        pytest.skip("Linux on x86-64 and arm64 offers the most")
    held = protections()
    assert held["memory"]
    if "Seccomp:" in Path("/proc/self/status").read_text():
        assert held["processes"] and held["signals"] and held["network"]
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) > 0:  # Landlock's version
        assert held["reading"] and held["writing"]


@pytest.fixture
def less(tmp_path, monkeypatch):
    """The sandbox with a line changed, so that seccomp is missing."""
    source = Path(sandbox.__file__).read_text()
    line = 'not in ("x86_64", "aarch64")'
    assert source.count(line) == 1
    (tmp_path / "less.py").write_text(source.replace(line, '!= "none"'))
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("less")


@on_linux
def test_without_seccomp_programs_run_and_protections_says_what_is_missing(less, temp):
    held = less.protections()
    assert not held["signals"] and not held["network"]
    assert held["processes"] == (os.geteuid() != 0) and held["reading"] == protections()["reading"]
    # a child that stays in the session ends with it, and who kills the server kills nothing but its
    # own verdict
    child = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: time.sleep(60)"
    assert less.run_python(child).ok == (os.geteuid() == 0) and not processes_of(temp)
    kill = "import os; os.kill(os.getppid(), 9)\nwhile True: pass"
    results = less.run_many([kill, "print(2)"], workers=1)
    assert results == [less.Result(), less.Result(True, "2\n", None)]
    for left in temp.iterdir():  # of the server that was killed
        left.rmdir()


HEADERS = ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h"]


@pytest.mark.parametrize("column", [0, 1])
def test_the_numbers_of_system_calls_are_those_of_the_kernels_headers(column):
    header = Path(HEADERS[column])
    if not header.exists():
        pytest.skip(f"{header} is not there")
    define = r"#define __NR(?:3264)?_(\w+)\s+(\d+)"
    known = {name: int(number) for name, number in re.findall(define, header.read_text())}
    for name, numbers in sandbox.SYSCALLS.items():
        assert numbers[column] == known.get(name, sandbox.NONE), name
