"""One rank of a `RankPool`: read calls from a pipe, run them, and clean up after them."""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import random
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TextIO

MMAP_THRESHOLD, LARGE = -3, 1 << 20  # glibc's number of the first


def die_with(parent: int) -> None:
    """Have the kernel kill this rank when pytest goes, even while it hangs in native code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it was gone before we asked
        os._exit(1)


def free_at_once() -> None:
    """Return large blocks of memory to the system at once, so that tests see the memory in use.

    glibc keeps those of up to 32 MiB after it has seen one freed.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE)


def dump_stacks_on_signal(stacks: TextIO) -> None:
    """SIGUSR1 writes all Python stacks; works without the GIL, so in a GIL deadlock too."""

    def register() -> None:
        # register() alone does nothing if faulthandler believes its handler is still in place
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)

    plain = signal.signal

    def signal_keeping_ours(signum: Any, handler: Any) -> Any:
        before = plain(signum, handler)
        if signum == signal.SIGUSR1 and handler == signal.SIG_DFL:
            # Lightning "restores" every signal after fit; Python cannot see faulthandler's
            # handler, so it would restore the default, which kills
            register()
        return before

    signal.signal = signal_keeping_ours
    register()


class Baseline:
    """Process-wide state as it was before the first call, to be put back after each."""

    def __init__(self) -> None:
        import torch
        import torch._dynamo
        import torch._dynamo.guards
        import torch._functorch.config
        import torch._inductor.config

        # it flushes the processor's cache for each graph, to log a duration that no test reads
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
        torch._inductor.config.cpp.vec_isa_ok = True  # else it compiles and loads a program to find out
        configs = (torch._dynamo.config, torch._inductor.config, torch._functorch.config)
        self.configs = [(config, config.get_config_copy()) for config in configs]
        self.home = os.getcwd()
        self.environ = dict(os.environ)
        self.dtype = torch.get_default_dtype()
        self.matmul = torch.get_float32_matmul_precision()
        gc.collect()
        gc.freeze()  # else every clean-up walks all that torch and Lightning ever imported
        gc.set_threshold(200_000, 50, 50)  # tracing makes so many objects that clean-ups took a twentieth of the time

    def restore(self) -> None:
        import numpy
        import torch

        torch._dynamo.reset()
        for config, saved in self.configs:
            for name, value in config.get_config_copy().items():
                if name in saved and value != saved[name]:
                    setattr(config, name, saved[name])
        os.chdir(self.home)
        if os.environ != self.environ:
            os.environ.clear()
            os.environ.update(self.environ)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(self.dtype)
        torch.set_default_device(None)
        torch.set_float32_matmul_precision(self.matmul)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
        torch.autograd.set_detect_anomaly(False)
        torch.set_num_threads(1)
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)


class Worker:
    def __init__(self, link: Connection, backend: str, timeout: float) -> None:
        self.link = link
        self.backend = backend
        self.timeout = timedelta(seconds=timeout)
        self.cuda = "nccl" in backend
        self.calls = 0
        self.world: Any = None
        self.store: Any = None

    def join(self) -> None:
        import torch
        import torch.distributed as dist

        device = None
        if self.cuda:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        store = dist.PrefixStore(f"pool-{self.calls}", self.store)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            self.backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=self.timeout,
            device_id=device,
        )
        self.world = dist.group.WORLD

    def serve(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, is_master=False, timeout=self.timeout)
        self.join()
        self.baseline = Baseline()
        self.baseline.restore()
        self.link.send(("ready", None))
        while True:
            try:
                order, *body = self.link.recv()
            except (EOFError, OSError):
                return
            self.link.send(self.call(*body) if order == "call" else self.settle())

    def call(self, ref: tuple[str, str], arguments: bytes, cwd: str, port: int) -> tuple[str, Any]:
        from tests.ranks import wire

        self.calls += 1
        os.environ["MASTER_PORT"] = str(port)
        os.chdir(cwd)
        try:
            args, kwargs = wire.loads(arguments)
            function = wire.resolve(ref)
            if (module := sys.modules.get("lightning_zero.native.watchdog")) is not None:
                # Else an exception that a test catches, or Ctrl-C, would end this rank some seconds later, in a call of
                # another test: leave() is for processes that end.
                module.Watchdog.leave = module.Watchdog.close
            return "returned", wire.dumps(function(*args, **kwargs))
        except BaseException as error:
            inner = error.__traceback__.tb_next if error.__traceback__ else None
            return "raised", "".join(traceback.format_exception(type(error), error, inner))

    def settle(self) -> tuple[str, Any]:
        """Meet the other ranks, then forget the call; sent only once every rank has answered."""
        try:
            import torch
            import torch.distributed as dist

            if self.cuda:
                torch.cuda.synchronize()
            if dist.group.WORLD is not self.world:
                if dist.is_initialized():
                    dist.destroy_process_group()
                self.join()
            dist.barrier()
            torch._dynamo.reset()
            gc.collect()
            gc.freeze()  # the compiler's caches grow, and each clean-up would walk all of them
            # groups are threads and sockets, and communicators on a GPU; nothing else frees them
            for group in list(dist.distributed_c10d._world.pg_map):
                if group is not self.world:
                    dist.destroy_process_group(group)
            self.baseline.restore()
            if self.cuda:
                torch.cuda.empty_cache()
            return "settled", None
        except BaseException:
            return "raised", traceback.format_exc()


def begin(parent: int, stacks: str) -> None:
    free_at_once()
    die_with(parent)
    dump_stacks_on_signal(open(stacks, "a"))  # noqa: SIM115 - open as long as this rank lives


def import_all(modules: str) -> None:
    for module in filter(None, modules.split(",")):
        try:
            importlib.import_module(module)
        except Exception:
            # only a head start: the test that needs the module reports it
            traceback.print_exc()


def main() -> None:
    fd, parent, stacks, backend, timeout, preload = sys.argv[1:]
    begin(int(parent), stacks)
    import_all(preload)
    Worker(Connection(int(fd)), backend, float(timeout)).serve()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # pytest is gone: collective teardown could only hang
