import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: the oracle's threads would wait for one another on the cores that the ranks need.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Also before that: torch names a folder that all sessions share. This one is shared by the ranks, and by pytest's
# processes, but not with earlier sessions, whose kernels would be taken for this one's.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="lightning_zero-inductor-")

    def _remove(folder: str, process: int) -> None:
        if os.getpid() == process:  # and no copy of it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(_remove, os.environ["TORCHINDUCTOR_CACHE_DIR"], os.getpid())
# For processes that tests start; see the file there. The benchmarks have the package `compare`, which tests import.
QUICK = str(Path(__file__).parent / "quick")
BENCHMARKS = str(Path(__file__).parents[1] / "examples" / "benchmarks")
if QUICK not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [QUICK, os.environ.get("PYTHONPATH"), BENCHMARKS]))
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

import pytest  # noqa: E402

from tests.helpers.marks import mark_variants  # noqa: E402
from tests.ranks.pool import Ranks, serve_nurseries  # noqa: E402
from tests.ranks.shared_gpu import shares_gpu  # noqa: E402

WORKERS = 3  # processes; see pytest_cmdline_main
MANY_FILES = 8  # are run as folders are


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow, too")
    parser.addoption("--exhaustive", action="store_true", help="run all tests: those marked slow or exhaustive, too")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Print the plan of a full run, for users who did not write it."""
    if not all(Path(arg).is_dir() for arg in config.args) or config.option.collectonly:
        return None
    if config.getoption("--exhaustive"):
        what = "all tests, those marked slow or exhaustive, too: 20 to 21"
    elif config.getoption("--slow"):
        what = "what .ci/run runs (--exhaustive runs all): 15 to 16"
    else:
        what = "what is quick (--slow runs what .ci/run does): 6 to 7"
    return f"lightning_zero: {what} minutes on two cores, one more where the C++ executor has to be built; without GPUs by gloo"


def pytest_configure(config: pytest.Config) -> None:
    config.option.slow |= config.option.exhaustive
    if "PYTEST_XDIST_WORKER" not in os.environ and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # A run that is ended, as by timeout(1), would leave ranks that continue, and would not print the
        # failures until then.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    config.addinivalue_line(
        "markers", "gpu(count=1, apart=False): needs that many CUDA devices; apart: which ranks must not share"
    )


@pytest.hookimpl(tryfirst=True)  # before xdist looks at its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run folders, and many files, in three processes, each with files of its own.

    Ranks wait for one another so often that a single process leaves a third of two cores idle, and two an eighth. One
    process runs with ``-n 0``, with few files or tests, under a debugger, and on a machine with GPUs, since each test
    uses all of them.
    """
    option = config.option
    if (
        config.pluginmanager.hasplugin("xdist")
        and "PYTEST_XDIST_WORKER" not in os.environ
        and (option.numprocesses, option.dist, option.tx) == (None, "no", [])
        and not (option.usepdb or option.collectonly or option.keyword or option.capture == "no")
        and (all(Path(arg).is_dir() for arg in config.args) or len(config.args) > MANY_FILES)
        and (os.cpu_count() or 1) > 1
        and not Path("/dev/nvidiactl").exists()
    ):
        option.numprocesses, option.dist, option.loadscopereorder = WORKERS, "loadfile", False
        if sys.platform == "linux":
            serve_nurseries(4)  # which would otherwise import the same in each process


def _adds_nothing(item: pytest.Item) -> bool:
    """Compiled code on one rank shows nothing that other trainings do not show, and compilation takes most of the time."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return params.get("world_size") == 1 and params.get("backend") == "aot_eager"


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Any:
    made = yield
    if isinstance(made, list):  # the variants of one test, before any selection
        try:
            mark_variants([item for item in made if isinstance(item, pytest.Function)])
        except ValueError as error:
            raise collector.CollectError(str(error)) from error
    return made


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _adds_nothing(item)]
    unasked = {name for name in ("slow", "exhaustive") if not config.getoption(f"--{name}")}
    if unasked:
        left_out = [item for item in items if unasked & {mark.name for mark in item.iter_markers()}]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    marked = [(item, item.get_closest_marker("gpu")) for item in items]
    marked = [(item, mark) for item, mark in marked if mark is not None]
    if not marked:
        return
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item, mark in marked:
        found = 2 * devices if shares_gpu() and not mark.kwargs.get("apart") else devices
        needed = mark.args[0] if mark.args else mark.kwargs.get("count", 1)
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"{needed} CUDA devices needed, {found} found"))


@pytest.fixture(scope="session")
def native_library() -> None:
    """Built before any rank's deadline runs, if it builds; the test that needs it says if not."""
    try:
        from lightning_zero.native.build import build

        build()
    except Exception as error:
        print(f"the C++ executor was not built: {error}", file=sys.stderr)


@pytest.fixture(scope="session")
def ranks(native_library: None) -> Iterator[Ranks]:
    """`ranks.run(world_size, fn, *args)`: see tests/ranks/pool.py."""
    pools = Ranks()
    try:
        yield pools
    finally:
        pools.close()


@pytest.fixture(params=[1, 2, 3], ids="W={}".format)
def world_size(request: pytest.FixtureRequest) -> int:
    """Override with `@pytest.mark.parametrize("world_size", [2])`."""
    return request.param
