"""Runs Python that a model wrote: many programs at once, each in a process of its own that can do little harm.

A *server* is a fresh Python interpreter (`-I -S -E -B`, no torch) with the common modules loaded. It forks one process per
program, which takes milliseconds where a new interpreter takes tens. `run_many` starts servers, feeds each one program at a
time, and ends them. Nothing outlives the call and calls share nothing, so threads and torchrun's ranks may call at once.

What holds a program:

1. Linux and macOS: CPU time (a program that sleeps or waits is ended after ten times as long by the clock); files of at
   most 16 MB, 64 open at once; no core dump; no standard input, standard error dropped, 64 KiB of output kept; an empty
   environment; an empty working folder, removed with all it holds; a session of its own, all of whose processes are
   killed in the end. On Linux also memory (address space).
2. Linux on x86-64 and arm64, seccomp, no privileges needed: a program may start threads but no process, so the limits of a
   process are the limits of the program, and killing it is certain. It cannot signal, trace or slow down another process,
   has no network, and changes no file's mode, owner or times. It reaches none of its user's System V objects and keys.
3. Linux >= 5.13, Landlock, no privileges needed: it reads Python's library and the system's shared libraries, reads and
   writes its folder, and no more. (Before 6.2 it can still empty those library files that its user may write.)
4. Linux as root: all capabilities are given up. It stays the user root, since root's Python may lie in /root. So where
   Landlock is missing root's own files are open to it: run as another user there.

Without layer 2, so on macOS: there is network; it can kill whatever its user can, the server and the caller too; it starts no
process (RLIMIT_NPROC; on Linux then no thread either), except as root, when one that leaves the session lives on. Without
layer 3, so on macOS: it reads and writes whatever its user can. macOS does not limit memory. Nowhere limited: what all files
of a program hold together, and asking whether a file exists. `protections()` tries what each layer forbids and says what holds
on this machine. (It is to be believed before this page: macOS and arm64 are written for and were not at hand.)

The verdict. `.ok` means that the program ended as Python calls a success: after its last line, or by sys.exit(0) or exit().
Not ok are an exception, another exit code, sys.exit("a reason"), os._exit(), a signal, and the limits. `.ok` is the word of the
program itself, and nothing guards it. A program may call sys.exit(0) anywhere, so tests that are appended to a program prove
nothing: let the program print, and compare `.stdout`. (A secret in the program's process could not guard `.ok` either: Python has
ways to read and write the interpreter's memory, with ctypes and without it. A program that reads memory may also find
what earlier programs of its server printed. The right answers are not there: a server is given only programs.)
"""

import builtins
import contextlib
import functools
import importlib
import json
import os
import resource
import select
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import dataclass

OUTPUT = 1 << 16  # bytes of output that are kept
WALL = 10  # a program that sleeps or waits is ended after this many times its limit of CPU time, by the clock
REPORT = 3  # the descriptor on which a program's process tells its server how it went: an error in one line, or DONE
DONE = b"\n"
WARM = "bisect collections copy dataclasses datetime decimal enum fractions functools heapq itertools math operator random re " \
       "statistics string threading time typing atexit ctypes"  # fmt: skip
SYSCALLS = {  # refused: (number on x86-64, on arm64)
    "fork": (57, None), "vfork": (58, None), "unshare": (272, 97), "setns": (308, 268),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "socket": (41, 198), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "semget": (64, 190), "semctl": (66, 191), "semop": (65, 193), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgctl": (71, 187), "msgsnd": (69, 189), "msgrcv": (70, 188), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "memfd_create": (319, 279),  # memory past the limit
    "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
CONDITIONS = {  # refused unless argument & mask == value: (numbers), argument, mask, value
    "clone": ((56, 220), 0, 0x10000, 0x10000),  # a thread
    "socketpair": ((53, 199), 1, 0xF, 1),  # a stream: asyncio wants one, and it can reach nobody else
    "prlimit64": ((302, 261), 0, 0xFFFFFFFF, 0),  # one's own limits
    "fcntl": ((72, 25), 1, 8, 0),  # not F_SETOWN, F_SETSIG: through them a file signals any process
    "ioctl": ((16, 29), 1, 0x8000, 0),  # not FIOSETOWN, SIOCSPGRP: likewise
}
FIRST_NEW = 424  # calls from here on, numbered alike everywhere, are "unknown": the C library then uses an older one


# --- inside a program's process ---


def _filter(machine):
    """The seccomp filter, in the kernel's little language (BPF): each instruction is (what, skip if true, skip if false, value)."""
    load, equal, at_least, bit_and, ret = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x50000 + 1, 0x50000 + 38, 0x80000000  # 1 is EPERM, 38 is ENOSYS
    column, architecture = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}[machine]
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (ret, 0, 0, kill)]
    code += [(load, 0, 0, 0), (at_least, 0, 1, FIRST_NEW), (ret, 0, 0, unknown)]
    for numbers in SYSCALLS.values():
        if numbers[column] is not None:
            code += [(equal, 0, 1, numbers[column]), (ret, 0, 0, refuse)]
    for numbers, argument, mask, value in CONDITIONS.values():
        code += [(equal, 0, 5, numbers[column]), (load, 0, 0, 16 + 8 * argument), (bit_and, 0, 0, mask)]
        code += [(equal, 0, 1, value), (ret, 0, 0, allow), (ret, 0, 0, refuse)]
    return b"".join(struct.pack("HBBI", *step) for step in [*code, (ret, 0, 0, allow)])


def _confine_on_linux(folder):
    """Layers 4, 3 and 2. The kernel may lack any of them. Returns whether seccomp's is in force."""
    import ctypes

    libc = ctypes.CDLL(None)
    words = [ctypes.c_void_p] * 4  # each a number or the address of some bytes
    libc.prctl.argtypes, libc.syscall.argtypes = [ctypes.c_int, *words], [ctypes.c_long, *words]
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: the server's end is ours
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS

    create_ruleset, add_rule, restrict_self = 444, 445, 446
    version = libc.syscall(create_ruleset, 0, 0, 1, 0)
    if version > 0:
        rights = (1 << (13, 14, 15, 15, 16)[min(version, 5) - 1]) - 1  # all that this version knows
        execute, write, read = 1, 2, 4 + 8  # read: files and folders
        libraries = [os.path.dirname(path) for path in sys.path] + ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]
        granted = dict.fromkeys(libraries, read) | {os.devnull: 4 + write, folder: rights - execute}
        rules = libc.syscall(create_ruleset, struct.pack("Q", rights), 8, 0, 0)
        for path, right in granted.items():
            with contextlib.suppress(FileNotFoundError):
                place = os.open(path, os.O_PATH)
                libc.syscall(add_rule, rules, 1, struct.pack("=Qi", right, place), 0)
                os.close(place)
        libc.syscall(restrict_self, rules, 0, 0, 0)
        os.close(rules)

    if os.uname().machine not in ("x86_64", "aarch64"):
        return False
    code = ctypes.create_string_buffer(_filter(os.uname().machine))
    return libc.prctl(22, 2, struct.pack("HP", len(code) // 8, ctypes.addressof(code)), 0, 0) == 0  # PR_SET_SECCOMP


def _limit(name, value):
    kind = getattr(resource, f"RLIMIT_{name}")
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with contextlib.suppress(ValueError, OSError):  # memory on macOS
        resource.setrlimit(kind, (value, value))


def _confine(folder, timeout, memory_mb):
    """Gives up for good what a program does not need."""
    for name, value in {"AS": memory_mb << 20, "CPU": int(timeout) + 1, "FSIZE": 16 << 20, "NOFILE": 64, "CORE": 0}.items():
        _limit(name, value)
    if not (sys.platform == "linux" and _confine_on_linux(folder)):
        _limit("NPROC", 0)


def _execute(code):
    """Runs the program, and ends it as Python does: threads are awaited, exit functions called, buffers written."""
    import atexit
    import threading

    output = sys.stdout
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(code, "<program>", "exec", dont_inherit=True), main.__dict__)
    except SystemExit as end:
        if not (end.code is None or isinstance(end.code, int) and end.code == 0):
            raise
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, output):
        with contextlib.suppress(Exception):
            stream.flush()


def _child(code, folder, timeout, memory_mb, output, report):
    try:
        os.setsid()
        os.chdir(folder)
        null = os.open(os.devnull, os.O_RDWR)
        for source, target in ((null, 0), (output, 1), (null, 2), (report, REPORT)):
            os.dup2(source, target)
        os.closerange(REPORT + 1, 64)
        _confine(folder, timeout, memory_mb)
        _execute(code)
        os.write(REPORT, DONE)
    except MemoryError:
        os.write(REPORT, b"memory")
    except BaseException as error:
        os.write(REPORT, f"{type(error).__name__}: {error}"[:300].rstrip(": \n").encode("utf-8", "replace"))
    finally:
        os._exit(0)


# --- the server ---


def _used(pid):
    """Seconds of CPU time that a process has used so far, in all its threads. 0 on macOS, which does not tell."""
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)  # Linux's number for the clock of another process
    return 0.0


def _watch(pid, output, report, timeout):
    """Reads both until the report ends, time is up, or the caller calls it off. Returns (output, report, whether time was up)."""
    got, pipes = {output: b"", report: b""}, [0, output, report]
    end = time.monotonic() + WALL * timeout
    while (left := min(timeout - _used(pid), end - time.monotonic())) > 0:
        for pipe in select.select(pipes, [], [], max(left, 0.01))[0]:
            chunk = os.read(pipe, OUTPUT) if pipe else b""
            got[pipe] = (got.get(pipe, b"") + chunk)[:OUTPUT]
            if pipe == output and not chunk:
                pipes.remove(output)
            elif pipe != output and (not chunk or len(got[report]) > 4096):
                return got[output], got[report], False
    return got[output], got[report], True


def _run(base, code, timeout, memory_mb):
    """One program, from fork to verdict."""
    folder = os.path.join(base, "work")
    os.mkdir(folder, 0o700)
    (output, output_end), (report, report_end) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(code, folder, timeout, memory_mb, output_end, report_end)
    os.close(output_end), os.close(report_end)
    stdout, said, late = _watch(pid, output, report, timeout)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    status = os.waitstatus_to_exitcode(status)
    late = late or used.ru_utime + used.ru_stime > timeout  # so that the verdict does not depend on when we looked
    os.set_blocking(output, False)
    with contextlib.suppress(BlockingIOError):  # what was still in the pipe
        stdout += os.read(output, OUTPUT)
    os.close(output), os.close(report)

    if late or status == -signal.SIGXCPU:
        error = "timeout"
    elif said:
        error = None if said == DONE else " ".join(said.decode("utf-8", "replace").split()) or "an empty report"
    else:
        error = signal.Signals(-status).name if status < 0 else f"exit code {status} before its end"
    return {"ok": error is None, "stdout": stdout[:OUTPUT].decode("utf-8", "replace"), "error": error}


def _empty(base):
    """Removes all that a folder holds. Folders move up before they are emptied: a program may nest them past any recursion."""
    folders = [base]
    while folders:
        folder = folders.pop()
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                folders.append(os.path.join(base, os.urandom(8).hex()))
                os.rename(entry.path, folders[-1])
            else:
                os.unlink(entry.path)
        if folder != base:
            os.rmdir(folder)


def _serve(base):
    """Reads programs, one JSON object a line, and answers each with its verdict. An empty line ends it, and the end of input."""
    os.environ.clear()
    sys.argv = [""]
    builtins.exit = builtins.quit = sys.exit  # as in Python without -S
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the caller may have it ignored, or signals blocked
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for name in WARM.split():
        importlib.import_module(name)
    try:
        while len(line := sys.stdin.buffer.readline()) > 1:
            verdict = json.dumps(_run(base, **json.loads(line)))
            _empty(base)
            os.write(1, f"{verdict}\n".encode())
            del verdict  # the next program could read it
    except BrokenPipeError:  # the caller is gone
        pass
    finally:
        _empty(base)
        os.rmdir(base)


# --- the caller ---


@dataclass(frozen=True)
class Result:
    ok: bool  # it ran to its end, which may be sys.exit(0)
    stdout: str  # at most 64 KiB; bytes that are no UTF-8 are replaced
    error: str | None  # one line: the exception, "timeout", "memory", a signal's name, "exit code 0 before its end"; None if ok


class _Server:
    def __init__(self):
        self.base = tempfile.mkdtemp(prefix="sandbox-")
        command = [sys.executable, "-I", "-S", "-E", "-B", "-X", "utf8", os.path.abspath(__file__), self.base]
        env = {"MALLOC_ARENA_MAX": "1"}  # or each thread would reserve 64 MB of the program's memory
        if "LD_LIBRARY_PATH" in os.environ:  # some Pythons do not start without
            env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, cwd=self.base, start_new_session=True)

    def send(self, line):
        with contextlib.suppress(BrokenPipeError):  # the answer will be the end of file
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def close(self):
        self.send("")
        self.process.communicate()
        with contextlib.suppress(FileNotFoundError):  # the server has removed it, unless it was killed
            _empty(self.base)
            os.rmdir(self.base)


def run_many(codes, *, timeout=5.0, memory_mb=512, workers=None):
    """Runs programs side by side: a Result for each, in order.

    timeout: seconds of CPU time for each, so that a verdict does not depend on what else the machine does.
    workers: default one per core. The ranks of a machine (LOCAL_WORLD_SIZE, which torchrun sets) share its cores.
    """
    todo = list(enumerate(codes))[::-1]
    results = [None] * len(todo)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = workers or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    busy = selectors.DefaultSelector()

    def give(server, index, code):
        busy.register(server.process.stdout, selectors.EVENT_READ, (server, index))
        server.send(json.dumps({"code": code, "timeout": timeout, "memory_mb": memory_mb}))

    try:
        for _ in range(min(len(todo), workers)):
            give(_Server(), *todo.pop())
        while busy.get_map():
            for key, _ in busy.select():
                server, index = key.data
                answer = server.process.stdout.readline()
                results[index] = Result(**json.loads(answer)) if answer else Result(False, "", "the sandbox was ended")
                busy.unregister(key.fileobj)
                if not answer or not todo:
                    server.close()
                if todo:
                    give(server if answer else _Server(), *todo.pop())
    finally:
        for key in list(busy.get_map().values()):  # some are left only when this was interrupted
            key.data[0].close()
        busy.close()
    return results


def run_python(code, *, timeout=5.0, memory_mb=512):
    """Runs one program. Never raises for what it does. Several are faster by run_many."""
    return run_many([code], timeout=timeout, memory_mb=memory_mb)[0]


@functools.cache
def protections():
    """Which protections are in force on this machine: {name: bool}. Found out by programs that try what each forbids."""
    attacks = {
        "memory": "bytearray(1 << 30)",
        "processes": "os.fork() or os._exit(0)",
        "signals": "os.kill(os.getppid(), 0)",
        "network": "socket.socket()",
        "reading": "os.listdir('/')",
        "writing": "os.mkdir('../outside')",
    }
    codes = [f"import os, socket\ntry:\n    {attack}\nexcept (OSError, MemoryError):\n    print('held')" for attack in attacks.values()]
    return {name: result.stdout == "held\n" for name, result in zip(attacks, run_many(codes))}


if __name__ == "__main__":
    _serve(sys.argv[1])
