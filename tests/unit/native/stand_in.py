"""A compiler that takes no time: a real build takes most of a minute."""

from pathlib import Path

# Logs each call, keeps the sources, answers --version, and writes `half`, then `whole`, to the file after -o.
COMPILER = """#!/bin/sh
echo "$@" >> "{log}"
if [ "$1" = --version ]; then echo "stand-in {version}"; exit 0; fi
while [ $# -gt 0 ]; do
    case "$1" in -o) target="$2";; *.cpp) cat "$1" >> "{log}-included";; esac
    shift
done
{body}
"""
WRITE = 'echo half > "$target"; sleep {pause}; echo whole > "$target"'


class Compiler:
    def __init__(self, folder: Path, body: str = WRITE.format(pause=0), version: str = "1.0") -> None:
        self.log, path = folder / f"calls-{version}", folder / f"compiler-{version}"
        path.write_text(COMPILER.format(log=self.log, version=version, body=body))
        path.chmod(0o755)
        self.path = str(path)

    def calls(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line != "--version"] if self.log.exists() else []

    def included(self) -> list[str]:
        """Return the names of the sources that the compiled files include."""
        return [line.split("/")[-1].rstrip('"') for line in Path(f"{self.log}-included").read_text().splitlines()]
