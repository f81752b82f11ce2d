"""Runs Python programs that a model wrote. In production, run this inside a container.

It runs many programs at once, each in a process that can do little harm.

A *server* is a fresh Python interpreter (no torch) that has loaded the common modules. It forks one
process per program: a fork takes milliseconds, a new interpreter takes tens of them. Calls share
nothing, so threads and torchrun's ranks may call at the same time.

Four layers protect the machine from a program:

1. Linux and macOS: limits of CPU time, files (16 MB each, 64 open at once), output (64 KiB are
   kept) and, on Linux, memory. A program that waits is ended after ten times its limit by the
   clock. The environment, the standard input and the working folder are empty. The program has a
   session of its own; in the end all its processes are killed.
2. Linux on x86-64 and arm64: seccomp. A program may start threads but no processes, so killing it
   is certain. It cannot signal, trace or slow down another process, has no network, and cannot
   change a file's mode, owner or times, or reach its user's System V objects and keys.
3. Linux >= 5.13: Landlock. A program may read Python's and the system's libraries, and may read and
   write its own folder, nothing else. (Before Linux 6.2 it can still empty a library file that its
   user may write.)
4. Linux as root: the program gives up all capabilities. It stays the user root, because root's
   Python may lie in /root. So without Landlock it can read and write root's own files.

Without layer 2 (on macOS, for example), a program has network, and can kill all that its user can
kill, the caller and its server too (whose folder then stays). It cannot start processes or, on
Linux, threads (RLIMIT_NPROC), except as root; then a process that leaves the session survives.
Without layer 3, it can read and write all that its user can. No system limits the total size of a
program's files, or hides whether a file exists. `protections()` tries what each layer forbids.
Trust it more than this page: the code for macOS and arm64 has not been tried there.

The verdict. `.ok` means that the program ended with success, as Python sees it: after its last
line, or by sys.exit(0). The program itself decides this: it may call sys.exit(0) anywhere, and may
write the interpreter's memory. So tests that are appended to a program prove nothing: let the
program print, and compare `.stdout`. It may find in memory what earlier programs of its server
printed, but not the right answers: a server gets only programs.
"""

import atexit
import builtins
import contextlib
import ctypes
import functools
import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import types
from dataclasses import dataclass

try:
    import resource
except ImportError:
    raise SystemExit("the sandbox needs Linux or macOS: on Windows use WSL.") from None

OUTPUT = 1 << 16  # bytes that are kept
REPORT, DONE = 3, b"\n"  # where a program's process reports an error in one line, or DONE
WARM = (
    "bisect collections copy datetime decimal enum fractions heapq itertools operator random re "
    "statistics string time typing"
)
NONE = (1 << 32) - 1  # an architecture has no such call
SYSCALLS = {  # refused system calls: (number on x86-64, number on arm64)
    # processes, own and others
    "fork": (57, NONE), "vfork": (58, NONE), "unshare": (272, 97), "setns": (308, 268),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    # network, System V objects, keys
    "socket": (41, 198), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "semget": (64, 190), "semctl": (66, 191), "semop": (65, 193), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgctl": (71, 187), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219),
    "memfd_create": (319, 279),  # memory beyond the limit
    # what belongs to files
    "truncate": (76, 45), "chmod": (90, NONE), "fchmod": (91, 52), "fchmodat": (268, 53),
    "chown": (92, NONE), "fchown": (93, 55), "lchown": (94, NONE), "fchownat": (260, 54),
    "utime": (132, NONE), "utimes": (235, NONE), "futimesat": (261, NONE), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    # and those that are refused unless argument & mask == value: numbers, argument, mask, value
    "clone": (56, 220, 0, 0x10000, 0x10000),  # only to start a thread
    # only for a stream: asyncio needs one, and it reaches no other process
    "socketpair": (53, 199, 1, 0xF, 1),
    "prlimit64": (302, 261, 0, 0xFFFFFFFF, 0),  # only for its own limits
    "fcntl": (72, 25, 1, 8, 0),  # not F_SETOWN, F_SETSIG: with them a file can signal any process
    "ioctl": (16, 29, 1, 0x8000, 0),  # not FIOSETOWN, SIOCSPGRP, for the same reason
}  # fmt: skip


# --- inside a program's process ---


def _filter(machine):
    """The seccomp filter, in the kernel's language BPF. An instruction: (what, skip if true, skip
    if false, value)."""
    load = 0x20
    equal = 0x15
    at_least = 0x35
    bit_and = 0x54
    ret = 0x06
    allow = (ret, 0, 0, 0x7FFF0000)
    refuse = (ret, 0, 0, 0x50000 + 1)  # EPERM
    unknown = (ret, 0, 0, 0x50000 + 38)  # ENOSYS
    kill = (ret, 0, 0, 0x80000000)
    column = ("x86_64", "aarch64").index(machine)
    architecture = (0xC000003E, 0xC00000B7)[column]
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), kill]
    # newer calls are answered with "unknown", and the C library uses older ones instead
    code += [(load, 0, 0, 0), (at_least, 0, 1, 424), unknown]
    for numbers in SYSCALLS.values():
        answer = [refuse]
        if numbers[2:]:
            argument, mask, value = numbers[2:]
            place = 16 + 8 * argument
            answer = [(load, 0, 0, place), (bit_and, 0, 0, mask), (equal, 0, 1, value), allow]
            answer.append(refuse)
        code.append((equal, 0, len(answer), numbers[column]))
        code += answer
    code.append(allow)
    return b"".join(struct.pack("HBBI", *step) for step in code)


def _confine_on_linux(folder):
    """Put layers 4, 3 and 2 in force, as far as the kernel has them. Returns whether layer 2 is."""
    libc = ctypes.CDLL(None)
    arguments = [ctypes.c_void_p] * 4  # each is a number, or the address of some bytes
    libc.prctl.argtypes = [ctypes.c_int, *arguments]
    libc.syscall.argtypes = [ctypes.c_long, *arguments]
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: this process ends with its server
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS

    create_ruleset, add_rule, restrict_self = 444, 445, 446
    version = libc.syscall(create_ruleset, 0, 0, 1, 0)
    if version > 0:
        rights = (1 << (13, 14, 15, 15, 16)[min(version, 5) - 1]) - 1  # all that it knows
        execute, write, read = 1, 2, 4 + 8  # read: files and folders
        libraries = [*map(os.path.dirname, sys.path), "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
        granted = dict.fromkeys([*libraries, "/usr/share/zoneinfo"], read)
        granted |= {os.devnull: 4 + write, folder: rights - execute}
        rules = libc.syscall(create_ruleset, struct.pack("Q", rights), 8, 0, 0)
        for path, right in granted.items():
            with contextlib.suppress(FileNotFoundError):
                place = os.open(path, os.O_PATH)
                libc.syscall(add_rule, rules, 1, struct.pack("=Qi", right, place), 0)
        libc.syscall(restrict_self, rules, 0, 0, 0)
        os.closerange(REPORT + 1, 64)

    if os.uname().machine not in ("x86_64", "aarch64"):
        return False
    code = ctypes.create_string_buffer(_filter(os.uname().machine))
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(code))
    return libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP


def _confine(folder, timeout, memory_mb):
    """Give up for good what a program does not need."""
    limits = {"AS": memory_mb << 20, "CPU": int(timeout) + 1, "FSIZE": 16 << 20, "NOFILE": 64,
              "CORE": 0}
    if not (sys.platform == "linux" and _confine_on_linux(folder)):
        limits["NPROC"] = 0
    for name, value in limits.items():
        # macOS refuses the limit of memory. The user's own limits stay if they are lower
        with contextlib.suppress(ValueError, OSError):
            # at its limit of CPU time a program gets SIGXCPU, and a second later SIGKILL
            most = value + (name == "CPU")
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, most))


def _child(code, folder, timeout, memory_mb, output, report):
    """Run the program in its process, and report how it ended."""
    try:
        os.setsid()
        os.chdir(folder)
        null = os.open(os.devnull, os.O_RDWR)
        for target, source in enumerate([null, output, null, report]):
            os.dup2(source, target)
        os.closerange(REPORT + 1, 64)
        _confine(folder, timeout, memory_mb)
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            exec(compile(code, "<program>", "exec"), main.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        # as Python ends: it waits for threads, calls exit functions, writes buffers
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.__stdout__):
            with contextlib.suppress(Exception):
                stream.flush()
        os.write(REPORT, DONE)
    except MemoryError:
        os.write(REPORT, b"memory")
    except BaseException as error:
        line = f"{type(error).__name__}: {error}"[:300].rstrip(": \n")
        os.write(REPORT, line.encode("utf-8", "replace"))
    finally:
        os._exit(0)


# --- the server ---


def _run(base, code, timeout, memory_mb):
    """Run one program, from the fork to the verdict: the fields of a Result."""
    folder = tempfile.mkdtemp(prefix="sandbox-", dir=base)
    report, report_end = os.pipe()
    with tempfile.TemporaryFile(dir=base) as output:
        pid = os.fork()
        if pid == 0:
            _child(code, folder, timeout, memory_mb, output.fileno(), report_end)
        os.close(report_end)
        # until the process reports or ends; or the caller stops it, by pipe 0; or time is up
        ready, _, _ = select.select([0, report], [], [], 10 * timeout)
        reported = os.read(report, 4096) if report in ready else b""
        os.close(report)
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        _, status, used = os.wait4(pid, 0)
        stdout = os.pread(output.fileno(), OUTPUT, 0).decode("utf-8", "replace")
    try:
        os.rmdir(folder)
    except OSError:  # there are files in it, perhaps too deep for a recursion such as rmtree's
        subprocess.run(["chmod", "-R", "u+rwx", folder], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", folder])

    status = os.waitstatus_to_exitcode(status)
    error = None
    # the kernel's own limit of CPU time counts whole seconds, and not exactly
    if not ready or used.ru_utime + used.ru_stime > timeout or status == -signal.SIGXCPU:
        error = "timeout"
    elif not reported:
        error = signal.Signals(-status).name if status < 0 else f"exit code {status} before its end"
    elif reported != DONE:
        error = " ".join(reported.decode("utf-8", "replace").split())[:300]
    return {"ok": error is None, "stdout": stdout, "error": error}


def _serve(base):
    """Read programs, one JSON object per line, and answer each with its verdict, until an empty
    line or the end. base: where their folders are made."""
    os.environ.clear()
    sys.argv = [""]
    builtins.exit = builtins.quit = sys.exit  # as in Python without -S
    # the caller may ignore this signal, or block signals
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for name in WARM.split():
        __import__(name)
    with contextlib.suppress(BrokenPipeError):  # the caller has ended
        while len(line := sys.stdin.buffer.readline()) > 1:
            os.write(1, json.dumps(_run(base, **json.loads(line))).encode() + b"\n")


# --- the caller ---


@dataclass(frozen=True)
class Result:
    ok: bool = False  # the program ran to its end; sys.exit(0) is an end, too
    stdout: str = ""  # at most 64 KiB; bytes that are not UTF-8 are replaced
    # None if ok, else one line: the exception, "timeout", "memory", a signal's name, "exit code 0
    # before its end"
    error: str | None = "the sandbox was ended"


def _start():
    """Start a server."""
    command = [sys.executable, "-I", "-S", "-E", "-B", "-X", "utf8", os.path.abspath(__file__)]
    # some Pythons do not start without LD_LIBRARY_PATH
    env = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
    env["MALLOC_ARENA_MAX"] = "1"  # otherwise each thread would reserve 64 MB of the memory
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [*command, tempfile.gettempdir()], env=env, start_new_session=True, **pipes)


def run_many(codes, *, timeout=5.0, memory_mb=512, workers=None):
    """Run programs side by side. Returns a Result for each, in order.

    timeout: seconds of CPU time for each program, so that other work of the machine does not change
    a verdict. workers: programs at a time; default: one per core. The ranks of a machine
    (LOCAL_WORLD_SIZE) share its cores.
    """
    from multiprocessing.connection import wait  # a server does not need it

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = workers or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    todo = list(enumerate(codes))[::-1]
    results = [Result()] * len(todo)
    servers, idle, busy = set(), [], {}  # busy: {a server's output: (server, index of its program)}
    try:
        while todo or busy:
            while todo and len(busy) < workers:
                server, (index, code) = idle.pop() if idle else _start(), todo.pop()
                servers.add(server)
                busy[server.stdout] = server, index
                program = json.dumps({"code": code, "timeout": timeout, "memory_mb": memory_mb})
                with contextlib.suppress(BrokenPipeError):  # it has ended, and answers nothing
                    print(program, file=server.stdin, flush=True)
            for output in wait(list(busy)):
                server, index = busy.pop(output)
                if answer := output.readline():
                    results[index] = Result(**json.loads(answer))
                    idle.append(server)
    finally:
        for server in servers:
            server.communicate("\n")
    return results


def run_python(code, *, timeout=5.0, memory_mb=512):
    """Run one program. Whatever the program does, this does not raise. For several programs,
    run_many is faster."""
    return run_many([code], timeout=timeout, memory_mb=memory_mb)[0]


@functools.cache
def protections():
    """Which protections are in force on this machine: {name: bool}. Small programs try what each
    forbids."""
    attacks = {
        "memory": "bytearray(1 << 30)", "processes": "os.fork() or os._exit(0)",
        "signals": "os.kill(os.getppid(), 0)", "network": "socket.socket()",
        "reading": "os.listdir('/')", "writing": "os.rmdir(os.getcwd())",
    }
    code = "import os, socket\ntry: {}\nexcept (OSError, MemoryError): print('held')"
    results = run_many([code.format(attack) for attack in attacks.values()])
    return {name: result.stdout == "held\n" for name, result in zip(attacks, results)}


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["--help"]):
        sys.exit(print(__doc__))
    _serve(sys.argv[1])
