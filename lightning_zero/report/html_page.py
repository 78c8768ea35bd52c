"""Draw the report of a training as one HTML page without scripts and without other files.

Time and memory come first, then a summary in words, then folded details. Colours are from the palette of Okabe and Ito,
which colour-blind readers can tell apart; each also has a pattern, and each bar has its number in its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lightning_zero.compile.graph_plan import GraphPlan
from lightning_zero.config.text import byte_unit, format_bytes
from lightning_zero.report.step_recorder import BACKWARD, BETWEEN, FORWARD, OPTIMIZER, PARTS
from lightning_zero.report.training_summary import (
    PART_NAMES,
    ROLE_NAMES,
    TrainingNumbers,
    summary_sentences,
)

MOMENTS = {
    BETWEEN: "Before the step",
    FORWARD: "At the end of forward",
    BACKWARD: "At the end of backward",
    OPTIMIZER: "At the end of the optimizer step",
}
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#555555")
# One for each colour, which replaces COLOUR.
PATTERNS = (
    "COLOUR",
    "repeating-linear-gradient(45deg, COLOUR 0 5px, #fff 5px 8px)",
    "repeating-linear-gradient(90deg, COLOUR 0 3px, #fff 3px 5px)",
    "radial-gradient(#fff 1.5px, transparent 2px) 0 0 / 7px 7px, COLOUR",
    "repeating-linear-gradient(-45deg, COLOUR 0 2px, #fff 2px 5px)",
    "repeating-linear-gradient(0deg, COLOUR 0 3px, #fff 3px 5px)",
    "radial-gradient(#333 1.2px, transparent 1.6px) 0 0 / 6px 6px, COLOUR",
    "repeating-linear-gradient(90deg, COLOUR 0 1px, #fff 1px 5px)",
)
STYLE = """
:root { color-scheme: light; print-color-adjust: exact; -webkit-print-color-adjust: exact }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 80rem; padding: 1.5rem; color: #1b1b1b }
h1, h2, h3, p, li { overflow-wrap: anywhere }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 }
h2 { font-size: 1.25rem; margin: 0 0 .25rem }
h2.details { margin-top: 1.25rem }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem }
p { margin: .25rem 0 .75rem }
.note, .facts { color: #4a4a4a; font-size: .9rem }
.cards { display: grid; gap: 1.25rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr));
  align-items: start; margin: 1.25rem 0 }
.cards > div { display: grid; gap: 1.25rem; min-width: 0 }
section, details { border: 1px solid #c8c8c8; border-radius: 8px; padding: 1rem 1.25rem; min-width: 0 }
details { margin: .75rem 0 }
summary { cursor: pointer; font-weight: 600 }
.total { font-size: 2rem; font-weight: 650; line-height: 1.2; margin: .25rem 0 }
.total small { font-size: .9rem; font-weight: 400 }
table { border-collapse: collapse; font-size: .9rem; margin: .5rem 0; width: 100% }
.bars { table-layout: fixed }
.bars .name { width: 36% }
.bars .name:has(.swatch) { padding-left: 22px; text-indent: -22px }
.bars .number { width: 4.7rem }
.bars .source { width: 5.8rem }
caption { font-weight: 600; padding: .5rem 0 .25rem; text-align: left }
th, td { border-bottom: 1px solid #e2e2e2; padding: .3rem .6rem .3rem 0; text-align: left; vertical-align: middle }
th { color: #4a4a4a; font-weight: 600 }
td:first-child { overflow-wrap: anywhere }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
.bar div, .strip div { height: 16px; min-width: 2px; border: 1px solid #333 }
.strip { display: flex; margin: .5rem 0 0 }
.strip div { height: 28px; border-left-width: 0 }
.strip div:first-child { border-left-width: 1px }
.axis { display: flex; justify-content: space-between; font-size: .8rem; color: #4a4a4a; margin-bottom: .5rem }
.swatch { display: inline-block; width: 14px; height: 14px; border: 1px solid #333; margin-right: 8px;
  vertical-align: -2px }
.measured, .estimated { border: 1px solid #777; border-radius: 9px; font-size: .75rem; font-weight: 400;
  padding: 0 .45rem; white-space: nowrap }
.estimated { border-style: dashed; font-style: italic }
pre { font-size: .8rem; overflow-x: auto; background: #f4f4f4; padding: .75rem }
dt { font-weight: 600 } dd { margin: 0 0 .5rem 1rem }
"""
FEW_ROLES = 5  # with more rows, the table of roles is higher than that of times
MEASURED, ESTIMATED = ('<span class="measured">measured</span>', '<span class="estimated">estimated</span>')


@dataclass(frozen=True)
class Details:
    """The folded part of the page.

    Attributes:
        training: plans of the graphs that ran in training batches.
        evaluation: plans of all other graphs.
        files: names of the graphs' text files.
        memory: the memory plan as text; "" without one.
        fitted: training has ended.
    """

    training: Sequence[GraphPlan] = ()
    evaluation: Sequence[GraphPlan] = ()
    files: Sequence[str] = ()
    memory: str = ""
    fitted: bool = True


def draw_page(numbers: TrainingNumbers, details: Details) -> str:
    """Return the page. It holds everything that it shows."""
    ranks = f"{numbers.ranks} rank{'s' * (numbers.ranks != 1)} on {numbers.device}"
    title = f"Training report: {numbers.module}"
    so_far = "" if details.fitted else " so far; the training still runs"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="facts">ZeRO-{numbers.stage}, {escape(ranks)}, {escape(numbers.dtype)}, '
        f"{numbers.steps:,} optimizer steps{so_far}. All numbers are those of rank 0.</p>",
        _cards(numbers),
        f"<section><h2>Summary</h2><p>{' '.join(escape(s) for s in summary_sentences(numbers))}</p></section>",
        '<h2 class="details">Details</h2>',
        _graphs("Graphs of training", "They ran in training batches.", details.training),
        _graphs(
            "Graphs of evaluation",
            "They ran in validation, in a test, in a prediction or in a call of the model after the training. The "
            "numbers above do not include them.",
            details.evaluation,
        ),
    ]
    if details.memory:
        parts.append(_folded("Memory plan", f'<pre tabindex="0">{escape(details.memory)}</pre>'))
    if details.files:
        links = "".join(f'<li><a href="{escape(name)}">{escape(name)}</a></li>' for name in details.files)
        parts.append(_folded("Nodes of each graph, as text", f"<ul>{links}</ul>"))
    parts.append(_folded("How these numbers were obtained", _origins(numbers)))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{_fills()}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


# -- time and memory


def _cards(numbers: TrainingNumbers) -> str:
    """Return two columns of about equal heights."""
    left, right, over_step = _time(numbers), _memory(numbers), _over_step(numbers)
    if len(numbers.roles) > FEW_ROLES:
        left += over_step
    else:
        right += over_step
    return f'<div class="cards"><div>{left}</div><div>{right}</div></div>'


def _time(numbers: TrainingNumbers) -> str:
    times = numbers.times
    if times is None:
        return "<section><h2>Time of one step</h2><p>No step was measured: each one compiled something.</p></section>"
    total = max(times.total_s, 1e-12)
    seconds = [times.parts[part] for part in PARTS]
    rows = [
        (PART_NAMES[part], share / total, f"{share * 1e3:.1f}", f"{share / total:.0%}", MEASURED)
        for part, share in zip(PARTS, seconds, strict=True)
    ]
    table = _bars("Parts of the step", ("Part", "ms", "Share", "Source"), rows)
    if numbers.exposed_estimated_s is None:
        waits = f"Time in which compute waits for other ranks: unknown ({escape(numbers.exposed_unknown)})."
    else:
        waits = (
            "In forward and backward, compute waits for weights and gradients of other ranks: "
            f"<strong>{numbers.exposed_estimated_s * 1e3:.1f} ms</strong> {ESTIMATED}."
        )
    batches = f", each with {times.batches} micro-batches" if times.batches > 1 else ""
    return (
        f'<section><h2>Time of one step</h2><p class="total">{total * 1e3:.1f} ms {MEASURED}</p>'
        f'{_strip([share / total for share in seconds])}<div class="axis"><span>0 ms</span>'
        f"<span>{total * 1e3:.1f} ms</span></div>{table}<p>{waits}</p>"
        f'<p class="note">Mean of the middle half of {times.steps} steps{batches}. Fastest step: '
        f"{times.fastest_s * 1e3:.1f} ms; slowest: {times.slowest_s * 1e3:.1f} ms. Steps that compiled something, "
        "and validation, do not count.</p></section>"
    )


def _memory(numbers: TrainingNumbers) -> str:
    device, peak = numbers.on_device, numbers.device_memory
    if not device:
        return "<section><h2>Memory of one rank</h2><p>Memory was not measured.</p></section>"
    total = max(sum(device.values()), 1)
    of = f"of {format_bytes(peak.total)} at the peak" if peak is not None else "between steps"
    rows = [
        (ROLE_NAMES.get(role, role), size / total, _number(size, total), f"{size / total:.0%}", MEASURED)
        for role, size in device.items()
    ]
    parts = [
        "<section><h2>Memory of one rank</h2>",
        f'<p class="total">{format_bytes(total)} <small>{of}</small> {MEASURED}</p>',
        _strip([size / total for size in device.values()]),
        f'<div class="axis"><span>0 {byte_unit(total)[0]}</span><span>{format_bytes(total)}</span></div>',
        _bars("Memory by role", ("Role", byte_unit(total)[0], "Share", "Source"), rows),
    ]
    if numbers.on_host:
        largest = max(numbers.on_host.values())
        rows = [
            (ROLE_NAMES.get(role, role), size / largest, _number(size, largest), "", MEASURED)
            for role, size in numbers.on_host.items()
        ]
        parts.append(_bars("Offloaded to the host", ("Role", byte_unit(largest)[0], "", "Source"), rows, len(device)))
    return "".join(parts) + "</section>"


def _over_step(numbers: TrainingNumbers) -> str:
    found = [(MOMENTS[part], numbers.memory[part]) for part in MOMENTS if numbers.memory.get(part)]
    if not found:
        return ""
    largest, first = max(size for _, size in found), found[0][1]
    rows = []
    for name, size in found:
        change = f"{'+' * (size >= first)}{_number(size - first, largest)}"
        rows.append((name, size / largest, _number(size, largest), change, MEASURED))
    whose = "Tensors on the device" if numbers.device_memory is not None else "The whole process (RSS)"
    heads = ("Moment", byte_unit(largest)[0], "Change", "Source")
    table = _bars(f"{whose}; changes are from the first row", heads, rows, len(COLOURS) - 1, same=True)
    return f"<section><h2>Memory over the step</h2>{table}</section>"


def _bars(
    caption: str,
    heads: tuple[str, str, str, str],
    rows: Sequence[tuple[str, float, str, str, str]],
    first: int = 0,
    same: bool = False,
) -> str:
    """Return a table with a bar in each row.

    Args:
        rows: name, size of the bar, number, further number, and its source. The largest bar has the full width.
        same: all bars have one colour, so that names need no swatch.
    """
    name, number, further, source = map(escape, heads)
    lines = [
        f'<table class="bars"><caption>{escape(caption)}</caption><tr><th class="name">{name}</th><th></th>'
        f'<th class="number">{number}</th><th class="number">{further}</th><th class="source">{source}</th></tr>'
    ]
    largest = max(row[1] for row in rows) or 1.0
    for place, (label, size, value, more, known) in enumerate(rows):
        fill = f"fill{(first + (0 if same else place)) % len(COLOURS)}"
        swatch = "" if same else f'<span class="swatch {fill}"></span>'
        lines.append(
            f'<tr><td class="name">{swatch}{escape(label)}</td><td class="bar"><div class="{fill}" '
            f'style="width:{size / largest:.2%}"></div></td><td class="number">{escape(value)}</td>'
            f'<td class="number">{escape(more)}</td><td>{known}</td></tr>'
        )
    return "".join(lines) + "</table>"


def _strip(shares: Sequence[float]) -> str:
    cells = (
        f'<div class="fill{number % len(COLOURS)}" style="width:{share:.2%}"></div>'
        for number, share in enumerate(shares)
    )
    return f'<div class="strip" aria-hidden="true">{"".join(cells)}</div>'


def _fills() -> str:
    fills = (pattern.replace("COLOUR", colour) for colour, pattern in zip(COLOURS, PATTERNS, strict=True))
    return "".join(f".fill{number} {{ background: {fill} }}\n" for number, fill in enumerate(fills))


def _number(size: float, largest: float) -> str:
    """Return a size in the unit of the largest size of a table, without the unit."""
    return format_bytes(size, largest).partition(" ")[0]


# -- details


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _graphs(title: str, note: str, graphs: Sequence[GraphPlan]) -> str:
    if not graphs:
        return _folded(f"{title} (none)", "<p>None was compiled.</p>")
    parts = [f"<p>{escape(note)}</p>"]
    for number, graph in enumerate(graphs, 1):
        parts.append(_graph(number, graph))
    return _folded(f"{title} ({len(graphs)})", "".join(parts))


def _graph(number: int, graph: GraphPlan) -> str:
    gathered, reduced = (sum(entry.bytes for entry in entries) for entries in (graph.gathers, graph.reduces))
    gradients = sum(len(reduce.weights) for reduce in graph.reduces)
    more = f", and reduces {gradients} gradients of {_mib(reduced)} MiB" if gradients else ""
    parts = [
        f"<h3>{graph.kind.capitalize()} graph {number}: {graph.nodes} nodes</h3><p>It gathers {_mib(gathered)} MiB of "
        f"weights in {len(graph.gathers)} all-gathers{more}.</p>"
    ]
    if graph.gathers:
        heads = ("Weights", "dtype", "MiB", "Starts before node", "First used by node", "Kept until")
        rows = [
            (
                ", ".join(gather.weights),
                gather.dtype,
                _mib(gather.bytes),
                f"{gather.before} ({gather.started})",
                f"{gather.used} ({gather.waited})",
                gather.until,
            )
            for gather in graph.gathers
        ]
        parts.append(_table("All-gathers, in their order", heads, rows))
    if graph.reduces:
        gradient_rows = [(", ".join(r.weights), r.dtype, _mib(r.bytes), str(r.at)) for r in graph.reduces]
        parts.append(_table("Gradients, in their order", ("Weights", "dtype", "MiB", "At node"), gradient_rows))
    return "".join(parts)


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose column "MiB" is right-aligned."""
    kinds = [' class="number"' if head == "MiB" else "" for head in heads]
    head = "".join(f"<th{kind}>{escape(text)}</th>" for kind, text in zip(kinds, heads, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table>"


def _origins(numbers: TrainingNumbers) -> str:
    clock = "the host's clock" if numbers.device_memory is None else "events on the device, which do not stop it"
    entries = [
        (
            f"Times {MEASURED}",
            f"Each part begins and ends at a hook of the Trainer. Times are those of {clock}.",
        ),
        (
            f"Memory by role {MEASURED}",
            "The bytes of the tensors of each role on rank 0. "
            + (
                "A CPU has no allocator that counts peaks, so that activations are not included."
                if numbers.device_memory is None
                else "The last device role is the rest of the memory that the allocator reserved at its peak."
            ),
        ),
        (
            f"Waiting for other ranks {ESTIMATED}",
            "Computed from the plan of the graphs, the measured speeds of the device and its links, and the measured "
            "time of forward and backward. Waits inside a CUDA graph cannot be measured.",
        ),
        (
            "Not included",
            "Validation, tests, predictions and calls of the model after the training change none of these numbers.",
        ),
    ]
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in entries) + "</dl>"


def _mib(size: float) -> str:
    return f"{size / 2**20:,.2f}"
