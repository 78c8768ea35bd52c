"""The page of a report: its order, its units and its words, and in a browser its layout."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_zero.compile.graph_plan import Gather, GraphPlan, Reduce
from lightning_zero.report.html_page import COLOURS, PATTERNS, Details, draw_page
from lightning_zero.report.step_recorder import StepTimes
from lightning_zero.report.training_summary import TrainingNumbers, summary_sentences
from tests.helpers.browser import look_at
from tests.helpers.report_numbers import ON_CPU, ON_GPU, TIMES

LONG = tuple(f"model.language_model.layers.{n}.self_attention.query_key_value.weight" for n in range(4))
FORWARD = GraphPlan(
    "forward", 412, (Gather(LONG, "bfloat16", 33554432, 3, "scaled_dot_product", 30, "mm_1", "backward"),), ()
)
BACKWARD = GraphPlan("backward", 800, FORWARD.gathers, (Reduce(LONG[:1], "bfloat16", 33554432, 41),))
EVALUATION = GraphPlan("forward", 7, (), ())
DETAILS = Details([FORWARD, BACKWARD], [EVALUATION], ["graph_00_forward_before.txt"], "Memory plan\n  row  1.0\n")


def text_of(page: str) -> str:
    """Return the text that a reader sees without unfolding."""
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def test_the_page_opens_with_time_and_memory_then_words_then_folded_details() -> None:
    page = draw_page(ON_GPU, DETAILS)
    places = [
        page.index(f"<h2>{title}") for title in ("Time of one step", "Memory over the step", "Memory of one rank")
    ]
    places += [page.index("<h2>Summary</h2>"), page.index(">Details</h2>"), page.index("<details>")]
    assert places == sorted(places)
    before = page[: page.index("<details>")]
    assert "scaled_dot_product" not in before, "names of nodes are for the details"
    assert "scaled_dot_product" in page
    assert "<details open" not in page


@pytest.mark.parametrize("numbers", [ON_GPU, ON_CPU], ids=["gpu", "cpu"])
def test_each_row_has_its_unit_and_its_source(numbers: TrainingNumbers) -> None:
    page = draw_page(numbers, DETAILS)
    for table in re.findall(r'<table class="bars">.*?</table>', page):
        assert re.search(r'<th class="number">(ms|GiB|MiB)</th>', table), table
        rows = re.findall(r"<tr><td.*?</tr>", table)
        assert rows
        assert all('class="measured"' in row or 'class="estimated"' in row for row in rows)


def test_the_parts_add_up_to_the_step() -> None:
    text = text_of(draw_page(ON_GPU, DETAILS))
    assert "199.9 ms measured" in text
    for number in ("61.2", "128.4", "9.1", "1.2"):
        assert number in text
    assert "21.3 ms estimated" in text


def test_colours_are_not_told_apart_by_red_and_green_alone() -> None:
    assert len(set(COLOURS)) == len(set(PATTERNS)) == len(COLOURS) == len(PATTERNS)
    page = draw_page(ON_GPU, DETAILS)
    for number in range(len(COLOURS)):
        assert f'<span class="swatch fill{number}">' in page, "each bar has a legend"


def test_graphs_of_an_evaluation_have_a_section_of_their_own() -> None:
    page = draw_page(ON_GPU, DETAILS)
    training = page[page.index("Graphs of training (2)") : page.index("Graphs of evaluation (1)")]
    assert "412 nodes" in training
    assert ": 7 nodes" not in training
    assert ": 7 nodes" in page[page.index("Graphs of evaluation (1)") :]


def test_names_are_escaped() -> None:
    page = draw_page(ON_CPU, DETAILS)
    assert "Tiny&lt;1&gt;" in page
    assert "Tiny<1>" not in page


def test_a_training_without_a_measured_step_says_so() -> None:
    page = draw_page(replace(ON_CPU, times=None), Details())
    assert "No step was measured" in page
    assert "Graphs of training (none)" in page


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (ON_GPU, "a larger batch, longer sequences"),
        (replace(ON_GPU, exposed_estimated_s=0.0), "Try a larger batch: 93.00 GiB"),
        (replace(ON_GPU, exposed_estimated_s=0.0, not_captured={"forward_backward": "hooks"}), "against CUDA graphs"),
        (replace(ON_CPU, times=StepTimes({**TIMES.parts, "between": 0.2}, 5, 0.1, 0.2, 1)), "num_workers"),
        (
            replace(ON_CPU, times=StepTimes({**TIMES.parts, "optimizer": 0.2}, 5, 0.1, 0.2, 1)),
            "accumulate_grad_batches",
        ),
        (ON_CPU, 'precision="bf16-mixed"'),
        (replace(ON_CPU, dtype="bfloat16"), "smaller model"),
        (replace(ON_CPU, times=None), "more steps"),
    ],
)
def test_the_summary_has_three_to_five_sentences_that_end_with_advice(numbers: TrainingNumbers, expected: str) -> None:
    found = summary_sentences(numbers)
    assert 3 <= len(found) <= 5
    assert expected in found[-1]
    assert all(sentence.endswith(".") for sentence in found)


def test_waits_are_estimated_unknown_or_none() -> None:
    assert "21.3 ms of a step" in summary_sentences(ON_GPU)[1]
    assert "(estimated)" in summary_sentences(ON_GPU)[1]
    assert "is unknown: links are not measured" in summary_sentences(ON_CPU)[1]
    assert "one rank" in summary_sentences(replace(ON_CPU, ranks=1))[1]


def test_small_sizes_are_in_mib_in_the_whole_table() -> None:
    page = draw_page(ON_CPU, DETAILS)
    table = page[page.index("Memory by role") :]
    assert re.findall('class="number">([^<]*)<', table[: table.index("</table>")])[:5:2] == ["MiB", "3.0", "1.0"]
    assert "4.0 MiB <small>" in page
    assert "<span>0 MiB</span><span>4.0 MiB</span>" in page


@pytest.mark.exhaustive
@pytest.mark.parametrize(("width", "scale"), [(640, 1), (800, 2), (1440, 1)])
@pytest.mark.parametrize("numbers", [ON_GPU, ON_CPU, replace(ON_CPU, times=None)], ids=["gpu", "cpu", "unmeasured"])
def test_in_a_browser_no_text_overlaps_or_overflows(
    tmp_path: Path, numbers: TrainingNumbers, width: int, scale: int
) -> None:
    page = tmp_path / "report.html"
    page.write_text(draw_page(numbers, DETAILS))
    looked = look_at(page, tmp_path, width, scale)
    assert (looked.width, looked.scale) == (width, scale)
    assert looked.texts > 50
    assert looked.headings[0].startswith("Training report")
    assert looked.errors == []
    assert looked.faults == []
