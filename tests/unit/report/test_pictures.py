"""Pictures are PNG files, also of nothing at all, and show what they are of."""

import struct

import pytest

from lightning_zero.report.memory import Alive, MemoryPoint, MemoryTimeline
from lightning_zero.report.pictures import memory_picture, overlap_picture
from lightning_zero.report.timeline import Compute, Gather, Reduce, simulate

MEMORY = MemoryTimeline((MemoryPoint("a", 1, 1), MemoryPoint("b", 5 << 20, 2)), 5 << 20, 1, (Alive("b", 5 << 20),))
STREAMS = simulate([Compute("a", 1.0), Compute("b", 2.0)], [Gather("w", 0, 1, 2.0)], [Reduce("g", 0, 1.0)])


def size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_pictures_are_png_of_a_readable_size() -> None:
    for png in (memory_picture("memory", MEMORY), overlap_picture("streams", STREAMS)):
        width, height = size(png)
        assert 600 < width < 2000
        assert 200 < height < 1000


def test_pictures_of_nothing_are_drawn() -> None:
    size(memory_picture("", MemoryTimeline((), 0, 0, ())))
    size(overlap_picture("", simulate([], [], [])))


def test_other_data_make_another_picture() -> None:
    later = simulate([Compute("a", 1.0), Compute("b", 2.0)], [Gather("w", 0, 1, 4.0)], [Reduce("g", 0, 1.0)])
    assert overlap_picture("t", STREAMS) == overlap_picture("t", STREAMS)
    assert overlap_picture("t", later) != overlap_picture("t", STREAMS)


@pytest.mark.parametrize("title", ["a $b_c", r"$\frac{$", "<&>"])
def test_a_title_is_no_formula(title: str) -> None:
    size(memory_picture(title, MEMORY))


def test_no_figure_is_left_in_pyplots_list() -> None:
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    memory_picture("memory", MEMORY)
    assert pyplot.get_fignums() == before
