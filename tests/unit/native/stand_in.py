"""A compiler that takes no time: a real build takes most of a minute."""

from pathlib import Path

# Writes a line for each call, keeps what it compiles, answers --version, and writes what it is told to the file after -o: `half`, then `whole`.
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
        """Names of the sources that the files which were compiled include."""
        return [line.split("/")[-1].rstrip('"') for line in Path(f"{self.log}-included").read_text().splitlines()]
