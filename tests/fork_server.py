"""Starts the Python programs of tests by forking a process that has already imported their modules.

An import costs such a program more than all that it does in a test. The process that forks, one for each group of
`GROUPS`, is a child of the test process and gives its children to it (CLONE_PARENT): to a test they are its own, with
their PIDs, exit statuses and signals. Programs that no group names, and all in a test with the fixture `real_exec`,
start as usual. Where the kernel or the C library has no such call everything does, and where an imported library starts
a thread, as jemalloc in some builds of pyarrow, all programs of that group.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import pkgutil
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

TESTS = Path(__file__).parent
GROUPS = {
    # The generator is patched by gevent, which no other program may be.
    "generator": (
        ["loadgen.client.worker", "numpy.random", "gevent.resolver.thread"],
        ["loadgen.client.worker", "loadgen.client.sink"],
    ),
    "locust": (["locust.main", "loadgen.locust.session", "loadgen.locust.page", "loadgen.locust.metrics"], ["locust"]),
    "servers": (
        [
            "servers.native.*", "servers.engines.null", "servers.gpu.sampler", "tritonclient.grpc", "argparse",
            "loadgen.measure.runner", "numpy.random",
        ],
        [
            "servers.native", "tests/fake_server.py", "tests/toy_language_server.py", "tests/truth/planted_server.py",
            "tests/truth/tuned_server.py", "tests/conformance/toy_server.py",
            "tests/integration/native/controlled_server.py", "tests/integration/native/echo_server.py",
            "tests.integration.native.health_probe", "tests/unit/loadgen/engines/fake_worker.py",
            "tests/truth/planted_reference.py", "tests/scripted_sampler.py", "tests/integration/loadgen/runner.py",
            "servers.gpu.sampler", "tests/integration/language/gated_server.py", "tests/fork_server.py commands",
        ],
    ),
    "commands": (
        [
            "loadgen.cli.*", "loadgen.measure.*", "loadgen.recorder.*", "loadgen.report.*", "servers.commands.*",
            "servers.measuring.*", "loadgen.entry", "scipy.optimize", "stringprep", "encodings.idna",
        ],
        ["loadgen.entry", "tests/unwatched_abserve.py", "tests/fork_server.py abserve"],
    ),
    "abserve": (
        [
            "torch._dynamo", "servers.plain.fastapi_server", "servers.plain.generate_server",
            "transformers.models.llama.modeling_llama",
        ],
        [
            "loadgen.entry engine", "loadgen.entry engines", "loadgen.entry export", "loadgen.entry language-reference",
            "servers.measuring.worker", "servers.plain.fastapi_server", "servers.plain.generate_server",
            "tests.integration.native.runner_server", "tests.integration.native.two_models_server",
        ],
    ),
}  # fmt: skip
"""Group → what its process imports (`.*`: all modules below a package), and the programs, as `python -m` or as files,
that it starts, with their first argument where only that one is meant. The last two groups are forked from the one
before, whose imports they have as well: a fork costs 6 ms of CPU, 9 and, with torch, 65."""
READ_AT_START = ("LD_", "PYTHON", "OMP_", "GOMP_", "TORCH", "TRITON_", "HF_", "TRANSFORMERS_")
"""Beginnings of variables that the loader, the interpreter and libraries read once: a program with other values than
the fork server had starts as usual."""
READ_LATER = ("OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR")
"""Not among them: a fork that has torch tells it the first. The second is written by torch's compiler in every test
process that imports it, and read when it is used."""
STARTERS = ("loadgen.entry", "tests/unwatched_abserve.py", "tests/integration/loadgen/runner.py")
"""Programs that start others: each gets a fork server of its own, so that those are its children."""
CAN_FORK = sys.platform == "linux" and platform.machine() == "x86_64" and importlib.util.find_spec("torch") is not None
"""Not where the client is tested alone, which lacks what the fork servers import."""
_SYS_CLONE, _PR_SET_PDEATHSIG, _PR_GET_TID_ADDRESS = 56, 1, 40
_CLONE_PARENT, _CHILD_CLEARTID, _CHILD_SETTID = 0x8000, 0x00200000, 0x01000000
_TITLE_BYTES = 8192
_MESSAGE_BYTES = 131_072
_close = os.close
"""Not that of gevent, which waits until its loop runs."""
_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_signature = inspect.signature(_execute)
usual_environment = dict(os.environ)
"""Of fork servers and most programs: without the variables of the test that happens to ask first."""
off = False
"""Whether every program starts as usual."""
_starting = threading.RLock()
above: ForkServer | None = None
"""Of a program that starts others: the one fork server that it has."""


def _pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MESSAGE_BYTES)
    return ours, theirs


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Without the folder of the tests in PYTHONPATH, which every fork server has there."""
    found = {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}
    told = {"PYTHONPATH": str(TESTS.parent)} | {name: found.get(name) for name in READ_LATER}
    return {name: value for name, value in found.items() if (name, value) not in told.items()}


def restore_environment() -> None:
    """Take back what a library has set in the test process, such as torch its cache's folder when it exports: all later
    programs would start as usual."""
    usual = read_at_start(usual_environment)
    for name in read_at_start(os.environ).keys() - usual.keys():
        del os.environ[name]
    os.environ.update(usual)


@dataclass
class ForkServer:
    """The end of a fork server at which its parent asks for programs."""

    socket: socket.socket
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    """Where it is a child of this process."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: bool = False

    def start(self, request: dict[str, object], descriptors: list[int]) -> int | None:
        """The PID of a new child of this process; None if this has ended, such as where a library starts a thread."""
        with self.lock:
            try:
                if not self.ended:
                    socket.send_fds(self.socket, [json.dumps(request).encode()], descriptors)
                    if answer := self.socket.recv(64):
                        return int(answer)
                    self._end()
            except ConnectionError:
                self._end()
            except BaseException:  # a test's limit of time: this answer would be taken for that of the next request
                _start_fork_server.cache_clear()
                raise
        return None

    def _end(self) -> None:
        self.ended = True
        if self.process is not None:
            self.process.wait()  # no test finds a zombie


def fork_server(group: str) -> ForkServer:
    """Started when a program of the group is first asked for, and once where two threads ask."""
    with _starting:
        return _start_fork_server(group)


@cache
def _start_fork_server(group: str) -> ForkServer:
    ours, theirs = _pair()
    # The last argument is room for the arguments of the programs, which other processes read there.
    argv = [sys.executable, "-P", str(Path(__file__)), group, str(theirs.fileno()), "x" * _TITLE_BYTES]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a thread would not survive the fork
    environment = {**usual_environment, **threads, "PYTHONPATH": str(TESTS.parent)}
    null, kept = subprocess.DEVNULL, [theirs.fileno()]
    with theirs:
        process = subprocess.Popen(argv, pass_fds=kept, env=environment, stdin=null, stdout=null)
    atexit.register(process.wait)
    atexit.register(ours.close)  # first: it ends when it can get no more requests
    return ForkServer(ours, read_at_start(usual_environment), process)


def _words_of(argv: list[str]) -> list[str]:
    """What stands behind the interpreter. `-m abserve -m NAME` runs NAME, and `-m abserve` the command line."""
    words = argv[2:] if argv[1:2] == ["-P"] else argv[1:]
    if words[:2] != ["-m", "abserve"]:
        return words
    return words[2:] if words[2:3] == ["-m"] else ["-m", "loadgen.entry", *words[2:]]


def _program_of(argv: list[str]) -> str:
    """A module or a file of the tests that this interpreter is to run, else an empty text."""
    words = _words_of(argv)
    if not words or argv[0] != sys.executable:
        return ""
    return words[1] if words[:1] == ["-m"] else words[0].removeprefix(f"{TESTS.parent}/")


def _server_for(argv: list[str]) -> ForkServer | None:
    program = _program_of(argv)
    words = _words_of(argv)
    with_argument = " ".join([program, *words[2 if words[:1] == ["-m"] else 1 :][:1]])
    groups = [group for name in (with_argument, program) for group, (_, own) in GROUPS.items() if name in own]
    if off or not groups:
        return None
    if above is not None:
        return None if groups[0] == "generator" else above
    # The engine of a native server may need torch.
    has_torch = program == "servers.native" and '"null"' not in argv[-1]
    return fork_server("abserve" if has_torch else groups[0])


def _execute_child(self: subprocess.Popen[bytes], *arguments: object) -> None:
    """In place of the method of `subprocess.Popen`, whose pipes are made by now and whose rest stays as it is."""
    given = _signature.bind(self, *arguments).arguments
    argv = given["args"]
    argv = [os.fsdecode(word) for word in argv] if isinstance(argv, list | tuple) else []
    tied = getattr(given["preexec_fn"], "__qualname__", "").startswith("ChildProcess.")
    environment = dict(os.environ if given["env"] is None else given["env"])
    server = None if given["shell"] or (given["preexec_fn"] and not tied) else _server_for(argv)
    if server is None or server.environment != read_at_start(environment):
        _execute(self, *arguments)
        return
    ends = (given["p2cread"], given["c2pwrite"], given["errwrite"])
    descriptors = [number if end == -1 else end for number, end in enumerate(ends)]
    kept = [int(number) for number in given["pass_fds"]]
    request = {
        "argv": argv, "env": environment, "cwd": os.fspath(given["cwd"] or Path.cwd()), "kept": kept,
        "session": given["start_new_session"], "parent": os.getpid() if tied else 0,
    }  # fmt: skip
    if (pid := server.start(request, [*descriptors, *kept])) is None:
        _execute(self, *arguments)
        return
    self.pid = pid
    self._child_created = True  # type: ignore[attr-defined]
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]


def install() -> None:
    """From now on this process's children start by a fork where they can."""
    if CAN_FORK:
        subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


def _clone_for_parent(libc: ctypes.CDLL) -> int:
    """`os.fork`, but the child is the parent's; the kernel writes its ID where the C library keeps that."""
    address = ctypes.c_void_p()
    libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    flags = _CLONE_PARENT | _CHILD_SETTID | _CHILD_CLEARTID | signal.SIGCHLD
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = libc.syscall(_SYS_CLONE, flags, 0, 0, address, 0)
    (ctypes.pythonapi.PyOS_AfterFork_Parent if pid else ctypes.pythonapi.PyOS_AfterFork_Child)()
    return pid


def _show(argv: list[str]) -> None:
    """Other processes see these arguments from now on, with spaces between them."""
    first, last = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = " ".join(argv).encode()[: last - first - 2] + b"\0"
    ctypes.memmove(first, text, len(text))
    ctypes.memset(last - 1, ord("x"), 1)  # no NUL at the end: the kernel shows the text up to the first one


def _become(request: dict[str, Any], descriptors: list[int], libc: ctypes.CDLL) -> types.CodeType:
    """Make this fork what the program's own process would be; returns its code, to be run as `__main__`."""
    if request["session"]:
        os.setsid()
    if request["parent"]:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != request["parent"]:
            os._exit(127)
    targets = [0, 1, 2, *request["kept"]]
    above = [fcntl.fcntl(number, fcntl.F_DUPFD, max(targets) + 1) for number in descriptors]
    for number in descriptors:
        _close(number)
    for number, target in zip(above, targets, strict=True):
        os.dup2(number, target)
        _close(number)
    # What is written there may be a pipe now, and was seekable.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "torch" in sys.modules and (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        sys.modules["torch"].set_num_threads(int(threads))
    sys.orig_argv = argv = request["argv"]
    _show(argv)
    words = _words_of(argv)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if words[0] == "-m":
        name, words = words[1], words[1:]
        spec: Any = importlib.util.find_spec(name)
        if spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{name}.__main__")
        loader = importlib.machinery.SourceFileLoader(spec.name, spec.origin)
        module.__spec__, module.__package__, words[0] = spec, spec.parent, spec.origin
        folder = request["cwd"]
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", words[0])
        folder = str(Path(words[0]).resolve().parent)
    if argv[1] != "-P":
        sys.path.insert(0, folder)
    module.__file__, module.__loader__, sys.argv = loader.path, loader, words
    code = loader.get_code(loader.name)
    assert code is not None
    return code


def main() -> types.CodeType:
    """Import the group's modules, then fork for each request; returns in a fork."""
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):  # one of the test that asked first is not for all later
        resource.setrlimit(limit, (resource.getrlimit(limit)[1],) * 2)
    modules, _ = GROUPS[sys.argv[1]]
    requests = socket.socket(fileno=fcntl.fcntl(int(sys.argv[2]), fcntl.F_DUPFD_CLOEXEC, 200))
    _close(int(sys.argv[2]))
    libc = ctypes.CDLL(None)
    libc.syscall.restype = ctypes.c_long
    for name in modules:
        package = importlib.import_module(name.removesuffix(".*"))
        if name.endswith(".*"):
            for _, below, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                importlib.import_module(below)
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise SystemExit(
            f"programs of {sys.argv[1]} start as usual: a library started a thread, which no fork would have"
        )
    gc.collect()
    gc.freeze()
    while True:
        request, descriptors = _serve(requests, libc)
        requests.close()
        if _program_of(request["argv"]) not in STARTERS:
            break
        ours, requests = _pair()
        if os.fork():
            requests.close()
            _have_above(ours, request["env"])
            break
        ours.close()
        for number in descriptors:
            _close(number)
    return _become(request, descriptors, libc)


def _serve(requests: socket.socket, libc: ctypes.CDLL) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request, and return it in the fork. The process ends with the requests."""
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, _MESSAGE_BYTES, 64)
        if not message:
            os._exit(0)  # without what libraries say of their own ends
        pid = _clone_for_parent(libc)
        if pid == 0:
            return json.loads(message), descriptors
        requests.send(str(pid).encode())
        for number in descriptors:
            _close(number)


def _have_above(ours: socket.socket, environment: Mapping[str, str]) -> None:
    """Let this process start others by the fork server at the other end."""
    global above
    above = ForkServer(ours, read_at_start(environment))
    install()


def _run(code: types.CodeType) -> NoReturn:
    """Run the program and end as the interpreter would, but for its last step: it would free all that the fork server
    has imported, object by object, and libraries would say what of it they miss."""
    status: Any = 0
    try:
        exec(code, vars(sys.modules["__main__"]))
    except SystemExit as exc:
        status = exc.code
    except Exception:  # noqa: BLE001 – as the interpreter does
        sys.excepthook(*sys.exc_info())
        status = 1
    if not isinstance(status, int | None):
        sys.stderr.write(f"{status}\n")
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = 120
    os._exit((status or 0) & 0xFF)


if __name__ == "__main__":
    _run(main())
