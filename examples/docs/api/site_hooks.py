"""Hooks of mkdocs: add linked files from outside of examples/docs, and make headings' anchors as GitHub does.

A linked Markdown file becomes a page under ``files/``; other files are copied there. Links are changed to fit.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

REPO = Path(__file__).parents[3]
DOCS, OUTSIDE = "examples/docs", "files"
LINK = re.compile(r"""(\]\(|\b(?:src|href|srcset)=")([^)#\s"]+)""")
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1\s*$|`[^`\n]+`", re.M | re.S)


def slugify(text: str, separator: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator)


def repo_path(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    return uri.removeprefix(f"{OUTSIDE}/") if uri.startswith(f"{OUTSIDE}/") else f"{DOCS}/{uri}"


def site_uri(path: str) -> str:
    """Return the place in the site of a file of the repository."""
    return relpath(path, DOCS) if path.startswith(f"{DOCS}/") else f"{OUTSIDE}/{path}"


def link_target(source: str, link: str) -> str | None:
    """Return the file of the repository to which a link in the file ``source`` leads; None if there is none."""
    path = normpath(f"{dirname(source)}/{link}")
    if "://" in link or link.startswith("mailto:") or path.startswith(".."):
        return None
    if (REPO / path).is_dir():
        return f"{path}/README.md" if (REPO / path / "README.md").exists() else None
    return path if (REPO / path).exists() else None


def links(markdown: str) -> list[str]:
    return [match[2] for match in LINK.finditer(FENCE.sub("", markdown))]


def on_config(config: Any) -> Any:
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify
    return config


def on_files(files: Files, config: Any) -> Files:
    pending = [repo_path(file.src_uri) for file in files.documentation_pages()]
    added = set()
    while pending:
        source = pending.pop()
        for link in links((REPO / source).read_text()):
            target = link_target(source, link)
            if target is None or target.startswith(f"{DOCS}/") or target in added:
                continue
            added.add(target)
            content = (REPO / target).read_bytes()
            uri = site_uri(target)
            files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
            if target.endswith(".md"):
                pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = repo_path(page.file.src_uri)
    here = dirname(page.file.src_uri)

    def change(match: re.Match[str]) -> str:
        target = link_target(source, match[2])
        return match[0] if target is None else match[1] + relpath(site_uri(target), here or ".")

    # Links in code stay as they are.
    parts, end = [], 0
    for code in FENCE.finditer(markdown):
        parts += [LINK.sub(change, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(change, markdown[end:])])
