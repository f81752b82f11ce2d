"""engine/scoring/sandbox.py: what a program can do, and all that it cannot: attacks, and after each
of them the caller is as it was."""

import ctypes
import importlib.util
import json
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

from engine.scoring import sandbox
from engine.scoring.sandbox import protections, run_many, run_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HOME = Path.home()
LINUX = sys.platform == "linux"


def caller_state():
    """What a call must leave as it was. What is open and what runs stands in `open_and_running`."""
    umask = os.umask(0)
    os.umask(umask)
    return {
        "cwd": os.getcwd(),
        "environment": {
            name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"
        },
        "umask": umask,
        "handlers": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "limits": {
            name: resource.getrlimit(getattr(resource, name))
            for name in dir(resource)
            if name.startswith("RLIMIT_")
        },
        "group": (os.getpgrp(), os.getsid(0)),
    }


def open_and_running():
    """The open descriptors and the threads. A call must add none; those that earlier tests left may
    end at any time."""
    return set(os.listdir("/dev/fd")) | set(threading.enumerate())


def processes_of(folder):
    """Servers that work in a folder, and what they forked: the folder stands on their command
    line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


def wait_until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.fixture(autouse=True)
def temp(tmp_path, monkeypatch):
    """Where the sandbox makes its folders. After each test: nothing in it, no process, and the
    caller as before."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before, had = caller_state(), open_and_running()
    with open(tmp_path / "of the caller", "w") as file:
        mine = os.fstat(file.fileno())
        yield folder
        assert os.fstat(file.fileno()) == mine  # the caller's files stay open
    assert caller_state() == before
    assert open_and_running() <= had
    assert processes_of(folder) == []
    assert list(folder.iterdir()) == []


@pytest.fixture
def needs(request):
    def check(*names):
        for name in names:
            if not protections()[name]:
                pytest.skip(f"'{name}' is not in force on this machine")

    return check


def timed(code, **options):
    start = time.monotonic()
    return run_python(code, **options), time.monotonic() - start


def errors(codes, head=""):
    """{program: its error}, of programs run side by side."""
    return {
        code: result.error for code, result in zip(codes, run_many([head + code for code in codes]))
    }


def refused(codes, head="", kinds=("PermissionError",)):
    found = errors(codes, head)
    return all(error and error.startswith(kinds) for error in found.values()) or found


# --- what a program may do ---


def test_a_program_prints_and_is_ok():
    result = run_python("import math\nprint('ü', math.pi)")
    assert (result.ok, result.stdout, result.error) == (True, "ü 3.141592653589793\n", None)


ORDINARY = [
    "",
    "if __name__ == '__main__': print('main')",
    "import sys; sys.setrecursionlimit(5000)\ndef f(n): return n and f(n - 1)\nf(4000)",
    "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nassert A() == A(1)",
    "import asyncio\nasync def f(): await asyncio.sleep(0)\nasyncio.run(f())",
    "from concurrent.futures import ThreadPoolExecutor as T\nwith T(16) as t: assert "
    "len(list(t.map(sorted, ['ab'] * 999))) == 999",
    "import array, csv, unicodedata, unittest, zoneinfo",  # none of them loaded before
    "import pickle\nclass A: pass\npickle.loads(pickle.dumps(A()))",
    "open('a', 'w').write('b'); import os; os.mkdir('c'); os.rename('a', 'c/d'); assert "
    "open('c/d').read() == 'b'; os.remove('c/d')",
    "import tempfile; tempfile.TemporaryFile().write(b'a'); open('/dev/null', 'w').write('a')",
    "from __future__ import annotations\ndef f(x: nothing): pass",
    "import sys; sys.stdout = None",
    "import os; os.close(0); os.close(1); os.close(2); print('a')",
    "import sys; sys.exit()",
    "import sys; sys.exit(False)",  # Python takes it for 0
    "raise SystemExit",
    "def main():\n    if True: exit(0)\nmain()",
    "quit(None)",
    "import ctypes; assert ctypes.CDLL(None).abs(-1) == 1",
    "import gc, sys; assert gc.get_objects(); sys.settrace(lambda *a: None)\ndef f(): pass\nf()",
]


def test_ordinary_programs_are_ok():
    assert errors(ORDINARY) == dict.fromkeys(ORDINARY)


@pytest.mark.parametrize(
    "code, stdout",
    [
        ("import threading, time; threading.Thread(target=lambda: time.sleep(0.1) or "
         "print('late')).start()", "late\n"),
        ("import atexit; atexit.register(print, 'late')", "late\n"),
        ("import atexit, sys; atexit.register(print, 'late'); print('a'); sys.exit(0)", "a\nlate\n"),
        ("import os; os.write(1, b'a\\xff\\xfe\\x80b')", "a\ufffd\ufffd\ufffdb"),
        ("import os; print('a\\0b')", "a\0b\n"),
        ("import sys; print(sys.argv, sys.flags.isolated, sys.flags.no_site, "
         "sys.dont_write_bytecode)", "[''] 1 1 True\n"),
        ("import sys; print('a', file=sys.stderr)", ""),
        ("import os; print(os.listdir())", "[]\n"),
        ("print('x' * 99_999)", "x" * 65536),
    ],
)
def test_output(code, stdout):
    result = run_python(code)
    assert result.ok and result.stdout == stdout


def test_no_standard_input():
    assert run_python("input()").error == "EOFError: EOF when reading a line"
    assert run_python("import sys; print(repr(sys.stdin.read()))").stdout == "''\n"


def test_the_environment_is_empty():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", "1")
        patch.setenv("LD_LIBRARY_PATH", "/nowhere")
        result = run_python("import os; print(dict(os.environ))")
    assert result.stdout == "{}\n"


def test_programs_do_not_share_a_random_seed():
    assert (
        len({r.stdout for r in run_many(["import random; print(random.random())"] * 4, workers=1)})
        == 4
    )


# --- what counts as an error ---


ERRORS = [
    ("1 / 0", "ZeroDivisionError: division by zero"),
    ("assert 1 == 2", "AssertionError"),
    ("raise ValueError('a\\n b')", "ValueError: a b"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    ("print(", "SyntaxError: '(' was never closed (<program>, line 1)"),
    ("a\0b", ("SyntaxError: source code string cannot", "ValueError: source code string cannot")),
    ("print('\ud800')", "UnicodeEncodeError"),
    ("import sys; sys.exit(3)", "SystemExit: 3"),
    ("import sys; sys.exit('a reason')", "SystemExit: a reason"),
    ("import sys; sys.exit(0.0)", "SystemExit: 0.0"),  # Python prints it and takes it for 1
    ("exit(-1)", "SystemExit: -1"),
    ("import os; os._exit(0)", "exit code 0 before its end"),
    ("import os; os._exit(3)", "exit code 3 before its end"),
    ("import sys; sys.setrecursionlimit(10**9)\nclass A: __repr__ = lambda a: repr(a)\nrepr(A())", ("SIG", "memory", "RecursionError")),
    ("(" * 100_000, ("SyntaxError", "memory", "RecursionError")),
    ("-" * 1_000_000 + "1", ("RecursionError", "memory", "SIG")),
    ("x = 1\n" * 1_000_000, ("memory", "RecursionError", "timeout")),
    ("class E(Exception):\n    def __str__(self): raise self\nraise E", "exit code 0 before its end"),
    ("import os; os.abort()", "SIG"),
    ("import signal; signal.setitimer(signal.ITIMER_REAL, 0.01)\nwhile True: pass", "SIGALRM"),
    ("import sys; sys.stdin.close(); sys.stdout.close(); 1 / 0", "ZeroDivisionError"),
]  # fmt: skip


def test_errors_are_one_line():
    for (code, expected), result in zip(ERRORS, run_many([code for code, _ in ERRORS])):
        assert not result.ok and result.error.startswith(expected), (code[:200], result.error)
        assert "\n" not in result.error and len(result.error) <= 300


def test_what_was_printed_before_an_error_is_kept():
    # as far as it had left the program's buffer
    assert run_python("print('a')\n1 / 0").stdout in ("a\n", "")
    assert run_python("print('a', flush=True)\nimport os; os._exit(1)").stdout == "a\n"


def test_a_program_that_exits_in_the_middle_is_ok_so_that_tests_below_it_prove_nothing():
    code = "import sys\ndef double(x): return x\nprint('mine')\nsys.exit(0)\nassert double(2) == 4\nprint('tested')"
    assert run_python(code) == sandbox.Result(ok=True, stdout="mine\n", error=None)


def test_an_exit_code_is_taken_as_python_takes_it():
    codes = [
        f"import sys\nsys.exit({code})"
        for code in ("", "0", "None", "False", "1", "True", "-1", "0.0", "''", "'a'", "[]")
    ]
    python = [
        subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode
        for code in codes
    ]
    assert [result.ok for result in run_many(codes)] == [code == 0 for code in python]


# --- time, memory, output, files ---


def processor_seconds():
    """CPU time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "9 ** 9 ** 9",  # inside C, where no signal handler runs
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import signal\nfor s in signal.valid_signals() - {9, 19}: signal.signal(s, "
        "signal.SIG_IGN)\nwhile True: pass",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nwhile "
        "True: pass",
        "import threading\nfor _ in range(8): threading.Thread(target=lambda: [0 for _ in "
        "iter(int, 1)]).start()",
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
        "while True: print('x' * 1_000_000)",  # gigabytes
        "import os\nwhile True: os.write(1, b'x')",
    ],
)
def test_processor_time_is_limited(code):
    before = processor_seconds()
    result = run_python(code, timeout=0.3)
    assert (result.ok, result.error) == (False, "timeout")
    assert 0.3 <= processor_seconds() - before < 1.5  # with that of the server


@pytest.mark.parametrize("code", ["import time; time.sleep(1e6)", "import atexit, time; "
                                                                  "atexit.register(time.sleep, 1e6)"])
def test_a_program_that_does_nothing_is_ended_later(code):
    result, seconds = timed(code, timeout=0.1)
    assert (result.ok, result.error) == (False, "timeout")
    assert seconds >= 0.1 * sandbox.WALL


def test_waiting_is_not_counted():
    assert run_python("import time; time.sleep(0.5); print(1)", timeout=0.1).ok


@pytest.mark.skipif(not LINUX, reason="shares one core among processes in Linux's way")
def test_a_verdict_does_not_depend_on_the_number_of_ranks(temp):
    """Four ranks on one core: each of their programs gets a quarter of it, and needs twice the time
    limit by the clock."""
    core = f"import os\nos.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\nos.environ['LOCAL_WORLD_SIZE'] = '4'"
    work = "import time\nwhile time.process_time() < 0.4: pass\nprint('good')"
    ranks = [caller(temp, [work, work], core, timeout=0.8) for _ in range(4)]
    expected = str([(True, "good\n", None)] * 2)
    assert [rank.communicate(timeout=60) for rank in ranks] == [(f"{expected}\n", "")] * 4


@pytest.mark.skipif(not LINUX, reason="cores are counted in Linux's way")
@pytest.mark.parametrize("ranks, workers", [(None, 8), ("1", 8), ("3", 2), ("8", 1), ("64", 1)])
def test_the_ranks_of_one_machine_share_its_cores(ranks, workers):
    servers = []

    class Counted(sandbox._Server):
        def __init__(self):
            servers.append(self)
            super().__init__()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "_Server", Counted)
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if ranks:
            patch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert all(result.ok for result in run_many([""] * 8))
    assert len(servers) == workers


def test_output_is_cut_and_kept_up_to_the_time_limit():
    result = run_python("print('a')\nwhile True: print('x' * 1000)", timeout=0.5)
    assert result.stdout == ("a\n" + ("x" * 1000 + "\n") * 70)[:65536]


def test_the_limits_of_a_process():
    code = "import resource as r\nfor n in ('CPU', 'FSIZE', 'NOFILE', 'CORE'): print(n, *r.getrlimit(getattr(r, 'RLIMIT_' + n)))"
    limits = {
        line.split()[0]: line.split()[1:]
        for line in run_python(code, timeout=2.5).stdout.splitlines()
    }
    assert limits == {
        "CPU": ["3", "3"], "FSIZE": ["16777216"] * 2, "NOFILE": ["64"] * 2, "CORE": ["0", "0"],
    }


def test_no_descriptor_is_inherited():
    code = "import os\nfor fd in range(64):\n    try: os.fstat(fd)\n    except OSError: continue\n    print(fd)"
    with open(__file__) as opened:
        os.set_inheritable(opened.fileno(), True)
        assert run_python(code).stdout.split() == ["0", "1", "2", str(sandbox.REPORT)]


def test_a_program_may_set_itself_a_lower_limit():
    code = "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass"
    assert run_python(code, timeout=20).error == "timeout"


@pytest.mark.parametrize(
    "code", ["x = bytearray(10 << 30)", "x = 'a' * 10**10", "x = []\nwhile True: "
                                                            "x.append(bytearray(1 << 20))", "print('a' * 10**10)"]
)
def test_memory_is_limited(code, needs):
    needs("memory")
    assert run_python(code).error == "memory"


def test_memory_limit_is_the_argument(needs):
    needs("memory")
    code = "x = bytearray(200 << 20)"
    assert [run_python(code, memory_mb=mb).error for mb in (512, 128)] == [None, "memory"]


def test_memory_cannot_be_had_past_the_limit(needs):
    needs("memory", "processes")
    assert run_python("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))").error.startswith(
        "ValueError"
    )
    assert run_python("import os; os.memfd_create('a')").error.startswith(
        ("PermissionError", "AttributeError")
    )


def test_files_are_limited():
    assert (
        run_python("f = open('a', 'wb')\nwhile True: f.write(bytes(1 << 20))").error
        == "OSError: [Errno 27] File too large"
    )
    assert run_python("f = [open('a', 'w') for _ in range(100)]").error.startswith(
        "OSError: [Errno 24]"
    )


# --- processes and signals ---


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError as e: error = e\n    else: "
        "continue\n    raise error",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while "
        "True: pass",
        "import subprocess; subprocess.run(['sleep', '100'])",
        "import subprocess; subprocess.Popen(['sleep', '100'], start_new_session=True)",
        "import os; os.posix_spawn('/bin/sleep', ['sleep', '100'], {})",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
    ],
)
def test_no_process_can_be_started(code, needs):
    needs("processes")
    result, seconds = timed(code)
    assert result.error.startswith("PermissionError: [Errno 1]") and seconds < 2


def test_no_other_program_can_be_started_in_its_place(needs):
    needs("reading")
    assert run_python("import os; os.execv('/bin/sleep', ['sleep', '100'])").error.startswith(
        "PermissionError"
    )


@pytest.mark.parametrize(
    "attack",
    [
        "os.kill(os.getppid(), {})",
        "os.kill(-1, {})",
        "os.kill(1, {})",
        "os.killpg(os.getpgid(os.getppid()), {})",
        "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), {})",
    ],
)
def test_nobody_can_be_signalled(attack, needs):
    """The real attack is made only where a harmless signal was refused: this test must not hurt
    when it fails."""
    needs("signals")
    code = f"import os, signal\ntry: {attack.format(0)}\nexcept (OSError, AttributeError): {attack.format(9)}"
    results = run_many([code, "print(1)"], workers=1)
    assert results[0].error.startswith(("PermissionError", "OSError: [Errno 38]", "AttributeError"))
    assert results[1].ok


@pytest.mark.skipif(not LINUX, reason="Linux's ways")
def test_no_process_can_be_reached_by_a_detour(needs):
    needs("signals")
    codes = [
        # the owner of a file is sent signals
        "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
        "import fcntl, os; fcntl.fcntl(os.pipe()[0], 10, 9)",  # and this says which: F_SETSIG
        "import fcntl, os, socket, struct; fcntl.ioctl(socket.socketpair()[0], 0x8901, "
        "struct.pack('i', os.getppid()))",
        "import fcntl, os, socket, struct; fcntl.ioctl(socket.socketpair()[0], 0x8902, "
        "struct.pack('i', os.getppid()))",
        "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 5)",
        "import os; os.sched_setaffinity(os.getppid(), {0})",
        "import os; os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))",
        "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (9999, 9999))",
    ]
    assert refused(codes) is True


REFUSED = """
fork vfork unshare setns kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo ptrace process_vm_readv process_vm_writev setpriority
ioprio_set migrate_pages move_pages sched_setparam sched_setscheduler sched_setaffinity sched_setattr socket shmget shmat semget
msgget mq_open shmctl semctl semop semtimedop msgctl msgsnd msgrcv mq_unlink add_key request_key keyctl memfd_create truncate
chmod fchmod fchmodat chown fchown lchown fchownat utime utimes futimesat utimensat setxattr lsetxattr fsetxattr removexattr
lremovexattr fremovexattr
"""
NATIVE = """
import ctypes, errno, os, sys
sys.path.insert(0, {root!r})
from engine.scoring import sandbox
libc = ctypes.CDLL(None, use_errno=True)
sandbox._confine_on_linux({folder!r})
for name in {names!r}:
    number = sandbox.SYSCALLS[name][os.uname().machine == "aarch64"]
    if number is not None:
        result = libc.syscall(ctypes.c_long(number), ctypes.c_long(-1), *[ctypes.c_long(0)] * 4)
        if (result, ctypes.get_errno()) != (-1, errno.EPERM): print(name, result, ctypes.get_errno())
if (libc.syscall(ctypes.c_long(999), 0), ctypes.get_errno()) != (-1, errno.ENOSYS): print("a new call")
print("done")
"""


def test_every_system_call_of_the_list_is_refused(needs, temp):
    """Also those that Python cannot make. The arguments are such that none of them could do
    anything."""
    needs("processes")
    code = NATIVE.format(root=str(ROOT), folder=str(temp), names=REFUSED.split())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.skipif(not LINUX, reason="System V's segments by their Linux numbers")
def test_shared_memory_of_the_user_outlives_a_program_that_removes_it(needs):
    needs("processes")
    libc = ctypes.CDLL(None)
    segment = libc.shmget(0, 4096, 0o1600)
    remove, look = (
        f"import ctypes\nprint(ctypes.CDLL(None).shmctl({segment}, 0, None))",
        (segment, 2, ctypes.create_string_buffer(256)),
    )
    try:
        assert run_python(remove).stdout == "-1\n" and libc.shmctl(*look) == 0
    finally:
        libc.shmctl(segment, 0, None)


# --- network ---


def test_there_is_no_network(needs):
    needs("network")
    codes = [
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
        "socket.create_connection(('127.0.0.1', 80))",
        "socket.create_server(('127.0.0.1', 0))",
        "socket.socketpair(type=socket.SOCK_DGRAM)",  # could be connected elsewhere
    ]
    assert refused(codes, "import socket\n") is True


# --- files ---


def test_nothing_outside_can_be_read(needs):
    needs("reading")
    paths = [
        "/etc/passwd", "/proc/self/environ", "/proc/1/cmdline", str(ROOT / "train.py"),
        sandbox.__file__, "link", "../../less.py",
    ]
    codes = [
        f"import os; os.symlink('/etc/passwd', 'link'); open({path!r}).read()" for path in paths
    ]
    assert refused(codes, kinds=("PermissionError", "FileNotFoundError")) is True
    assert (
        refused(
            [
                f"import os; os.listdir({path!r})"
                for path in ("/", "..", str(HOME), str(ROOT), "/proc", "/tmp")
            ]
        )
        is True
    )


@pytest.mark.parametrize("folder", [HOME, ROOT, ROOT / "engine", Path("/tmp"), Path("/dev/shm"), Path(os.__file__).parent])
def test_nothing_outside_can_be_written(folder, needs):
    needs("writing")
    target = folder / "sandbox_was_here"
    path = str(target)
    attacks = [
        f"open({path!r}, 'w')", f"os.mkdir({path!r})", f"os.symlink('/', {path!r})",
        f"open('a', 'w'); os.rename('a', {path!r})",
    ]
    try:
        assert (
            refused(
                attacks, "import os\n",
                ("PermissionError", "OSError: [Errno 18]", "FileNotFoundError"),
            )
            is True
        )
        assert not os.path.lexists(target)
    finally:
        if os.path.lexists(target):
            target.rmdir() if target.is_dir() and not target.is_symlink() else target.unlink()


def facts(path):
    found = path.stat()
    return (
        found.st_mode, found.st_uid, found.st_mtime, found.st_nlink,
        os.listxattr(path) if LINUX else [],
    )


@pytest.mark.parametrize(
    "attack",
    ["open({!r}, 'a')", "open({!r}, 'w')", "os.remove({!r})", "os.rename({!r}, 'a')", "os.link({!r}, 'a')", "os.truncate({!r}, 0)"]
    + ["os.chmod({!r}, 0)", "os.chown({!r}, 1, 1)", "os.utime({!r}, (0, 0))", "os.setxattr({!r}, "
                                                                              "'user.a', b'a')"],
)
def test_a_file_outside_stays_as_it_is(attack, needs, tmp_path):
    needs("writing", "processes")
    target = tmp_path / "target"
    target.write_text("text")
    os.utime(target, (1e9, 1e9))
    before = facts(target)
    result = run_python("import os\n" + attack.format(str(target)))
    assert result.error.startswith(("PermissionError", "OSError", "AttributeError"))
    assert target.read_text() == "text"
    assert facts(target) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="is about root")
@pytest.mark.skipif(not LINUX, reason="capabilities are Linux's")
def test_root_has_no_privileges_left():
    assert (
        refused(
            ["os.chroot('.')", "os.setuid(1)", "os.nice(-1)", "os.mknod('a', 0o20600, 259)"],
            "import os\n",
        )
        is True
    )


@pytest.mark.parametrize(
    "code",
    [
        # deeper than recursion, longer than a path
        "import os\nfor _ in range(1200): os.mkdir('a'); os.chdir('a')\nopen('file', 'w')",
        "import os\nos.umask(0o777)\nos.mkdir('a')\nos.mkdir('b', 0)",
        "for n in range(1200): open(str(n), 'w')",
        "import os\nos.symlink('.', 'a'); os.symlink('nowhere', 'b'); os.mkfifo('c'); os.link('c', "
        "'d'); open('\\n', 'w')",
    ],
)
def test_the_folder_is_removed_whatever_it_holds(code):
    assert run_python(code, timeout=10).ok  # and the fixture looks


def test_each_program_finds_its_folder_empty():
    code = "import os; print(os.listdir()); os.mkdir('a'); open('a/b', 'w')"
    assert [r.stdout for r in run_many([code] * 3, workers=1)] == ["[]\n"] * 3


def test_a_link_out_of_the_folder_is_not_followed_when_it_is_removed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    outside.chmod(0o555)
    (tmp_path / "file").write_text("a")
    code = f"import os\nos.symlink({str(outside)!r}, 'a'); os.symlink({str(tmp_path / 'file')!r}, 'b'); os.symlink({str(tmp_path)!r}, 'c')"
    assert run_python(code).ok
    assert (tmp_path / "file").read_text() == "a" and outside.stat().st_mode & 0o777 == 0o555


# --- the report on how it went ---

LEAVE = "\nos._exit(0)"
SEARCH = """
import os, sys
def search():
    frame, found = sys._getframe(), []
    while frame:
        found += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    return found + [value for module in list(sys.modules.values()) for value in vars(module).values()]
"""
MEDDLING = [
    "import os, sys; sys.stdout.flush()" + LEAVE,
    # messages of the server's own kind on every descriptor
    'import os\nfor fd in range(256):\n    try: os.write(fd, b\'{"ok": true, "stdout": "", '
    '"error": null}\\n\')\n    except OSError: 0'
    + LEAVE,
    "import os\nfor fd in range(256):\n    try: os.write(fd, b'0' * 32)\n    except OSError: 0" + LEAVE,
    "import os\nfor fd in range(256):\n    try: os.write(fd, b'')\n    except OSError: 0" + LEAVE,
    "import os\nos.dup2(1, 3)" + LEAVE,
    "import os\nos.dup2(3, 1); print('a', flush=True)" + LEAVE,
    "import os; os.closerange(0, 256)" + LEAVE,
    "import os; os.closerange(0, 256)\nwhile True: pass",
    "import os\nwhile True: os.write(3, b'0' * 99)",
    # the functions around the program replaced
    "import os\nos._exit = lambda code: None\n1 / 0",
    "import builtins, os\nos.write = lambda *a: 0\nbuiltins.BaseException = int\n1 / 0",
    "import builtins, os\nfor name in dir(builtins): setattr(builtins, name, None)\n1 / 0",
    "import os, sys\nsys.excepthook = lambda *a: None\nimport threading\nthreading._shutdown = "
    "lambda: os._exit(0)",
    "import atexit, os\natexit.register(os._exit, 0)\n1 / 0",
    "import os; os.execv('/bin/true', ['true'])",
]  # fmt: skip


def test_a_program_that_meddles_with_its_report_is_not_ok_and_harms_nobody():
    results = run_many(
        [code for meddling in MEDDLING for code in (meddling, "print('next')")], timeout=1,
        workers=2,
    )
    assert [
        code for code, result in zip(MEDDLING, results[::2]) if result.ok or not result.error
    ] == []
    assert [result.stdout for result in results[1::2]] == ["next\n"] * len(MEDDLING)


def test_machine_code_is_held_by_the_kernel(needs):
    needs("processes", "signals")
    code = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.kill(os.getppid(), 0), libc.fork(), ctypes.get_errno())"
    assert run_python(code).stdout == "-1 -1 1\n"


def test_a_program_sees_no_other_program():
    spy = (
        SEARCH
        + "print([v for v in search() if 'SEC' + 'RET' in "
          "str(v)])\nprint(repr(sys.__stdin__.buffer.peek()))"
    )
    results = run_many(["print('SECRET')", spy], workers=1)
    assert [r.stdout for r in results] == ["SECRET\n", "[]\nb''\n"]


# --- many at once ---


def test_results_come_in_order_and_programs_run_side_by_side():
    codes = [f"import time; time.sleep({1 - n / 10}); print({n})" for n in range(5)]
    start = time.monotonic()
    assert [r.stdout for r in run_many(codes, workers=5)] == [f"{n}\n" for n in range(5)]
    assert time.monotonic() - start < 3.5  # one after another: 4 s and more
    assert run_many([]) == []
    assert [r.stdout for r in run_many((f"print({n})" for n in range(20)), workers=3)] == [
        f"{n}\n" for n in range(20)
    ]


def test_a_bad_program_among_good_ones_costs_only_itself():
    bad = ["while True: pass", "import os; os.closerange(0, 64)", "x = [0] * 10**10"]
    codes = ["print(1)", bad[0], "print(2)", bad[1], "print(3)", bad[2], "print(4)"]
    assert [r.stdout for r in run_many(codes, timeout=0.5, workers=2) if r.ok] == [
        f"{n}\n" for n in range(1, 5)
    ]


def test_threads_may_call_at_the_same_time():
    found = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: run_many([f"print({n})"] * 4)}))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: [r.stdout for r in results] for n, results in found.items()} == {
        n: [f"{n}\n"] * 4 for n in range(4)
    }


CALLER = """
import sys, tempfile
sys.path.insert(0, {root!r})
tempfile.tempdir = {temp!r}
from engine.scoring.sandbox import run_many
{before}
results = run_many({codes!r}, timeout={timeout})
print([(r.ok, r.stdout, r.error) for r in results])
"""


def caller(temp, codes, before="", timeout=5.0):
    """A process of its own that calls run_many."""
    code = CALLER.format(
        root=str(ROOT), temp=str(temp), before=before, codes=codes, timeout=timeout
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_several_ranks_may_call_at_the_same_time(temp):
    ranks = [
        caller(temp, ["import sys; print(1); print(2, file=sys.stderr)", "1 / 0"] * 3)
        for _ in range(4)
    ]
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    expected = str([(True, "1\n", None), (False, "", "ZeroDivisionError: division by zero")] * 3)
    assert outputs == [(f"{expected}\n", "")] * 4


BUSY = """
import threading, torch
torch.set_num_threads(4)
torch.randn(256, 256) @ torch.randn(256, 256)
stop = threading.Event()
def work():
    while not stop.wait(0.001): torch.randn(64, 64) @ torch.randn(64, 64)
for _ in range(4): threading.Thread(target=work, daemon=True).start()
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
def fork():  # as a data loader does; the child holds a copy of every pipe, so that closing ours ends no server
    time.sleep(0.5)
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent: time.sleep(0.05)
        os._exit(0)
threading.Thread(target=fork, daemon=True).start()
"""


@pytest.mark.parametrize("before", [BUSY, ODD, FORKING])
def test_a_caller_with_many_threads_or_odd_settings_or_that_forks(temp, before):
    codes = [
        "print(1)",
        "while True: pass",
        "import signal; signal.setitimer(signal.ITIMER_REAL, 0.01)\nwhile True: pass",
    ]
    stdout, stderr = caller(temp, codes, before, timeout=1).communicate(timeout=60)
    assert (
        stdout
        == f"{[(True, chr(49) + chr(10), None), (False, '', 'timeout'), (False, '', 'SIGALRM')]}\n"
    ), stderr


@pytest.mark.skipif(not LINUX, reason="processes are found through Linux's /proc")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_caller_that_is_killed_leaves_nothing(temp, sent):
    process = caller(temp, ["while True: pass"] * 3, timeout=60)
    assert wait_until(lambda: len([p for p in processes_of(temp) if p != process.pid]) >= 2)
    time.sleep(0.3)
    process.send_signal(sent)
    process.communicate(timeout=10)
    assert wait_until(lambda: not processes_of(temp) and not list(temp.iterdir()))


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


def without(tmp_path, old, new):
    """The sandbox with a line changed, so that a layer is missing."""
    source = Path(sandbox.__file__).read_text()
    assert source.count(old) == 1
    (tmp_path / "less.py").write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("less", tmp_path / "less.py")
    sys.modules["less"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not LINUX, reason="Linux's layers")
def test_without_seccomp_programs_run_and_protections_says_what_is_missing(tmp_path):
    less = without(tmp_path, 'not in ("x86_64", "aarch64")', '!= "none"')
    held = less.protections()
    assert not held["signals"] and not held["network"]
    assert held["processes"] == (os.geteuid() != 0) and held["reading"] == protections()["reading"]
    assert less.run_python("print(1)").stdout == "1\n"
    # a child that stays in the session ends with it, and who kills the server kills nothing but its
    # own verdict
    child = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: time.sleep(60)"
    assert less.run_python(child, timeout=0.5).error.startswith(
        "timeout" if os.geteuid() == 0 else "BlockingIOError"
    )
    results = less.run_many(
        ["import os; os.kill(os.getppid(), 9)\nwhile True: pass", "print(2)"], workers=1
    )
    assert [(r.stdout, r.error) for r in results] == [("", "the sandbox was ended"), ("2\n", None)]


@pytest.mark.skipif(not LINUX, reason="Linux's layers")
def test_without_landlock_programs_run_and_protections_says_what_is_missing(tmp_path):
    less = without(tmp_path, "if version > 0:", "if False:")
    assert not less.protections()["reading"] and not less.protections()["writing"]
    assert less.protections()["network"] == protections()["network"]
    assert less.run_python("print(len(open('/etc/passwd').read()) > 0)").stdout == "True\n"


def test_a_machine_that_does_not_tell_the_time_of_another_process(tmp_path):
    """There the kernel's own limit, in whole seconds, ends the program; one that ends before is
    judged by what it has used."""
    less = without(tmp_path, "return time.clock_gettime((~pid << 3) | 2)", "raise OSError")
    codes = ["while True: pass", "import time\nwhile time.process_time() < 0.5: pass", "print(1)"]
    assert [result.error for result in less.run_many(codes, timeout=0.3)] == [
        "timeout", "timeout", None,
    ]


HEADERS = {
    "/usr/include/x86_64-linux-gnu/asm/unistd_64.h": 0, "/usr/include/asm-generic/unistd.h": 1,
}


@pytest.mark.parametrize("header, column", HEADERS.items())
def test_the_numbers_of_system_calls_are_those_of_the_kernels_headers(header, column):
    if not Path(header).exists():
        pytest.skip(f"{header} is not there")
    known = {
        name: int(n)
        for name, n in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text())
    }
    ours = sandbox.SYSCALLS | {name: numbers for name, (numbers, *_) in sandbox.CONDITIONS.items()}
    assert {name: numbers[column] for name, numbers in ours.items()} == {
        name: known.get(name) for name in ours
    }


def test_a_result_can_be_stored():
    result = run_python("print(1)")
    assert json.loads(json.dumps(vars(result))) == {"ok": True, "stdout": "1\n", "error": None}
