"""Compare published figures of papers with our code in virtual time.

Runs the named modules of papers, or all. Each writes its JSON and picture to
`benchmarks/results/papers`, and its part of `docs/benchmarks/papers.md`. No machine is measured.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.papers import frame

# In the order of the page.
MODULES = (
    "ulysses",
    "ring_flash_attention",
    "token_ring",
    "mesh",
    "usp",
    "lightseq",
    "lasp2",
    "gated_delta",
    "distca",
    "zeppelin",
    "bytescale",
    "dynamic_cp",
    "fcp",
)
PAGE = Path(__file__).parents[2] / "docs/benchmarks/papers.md"
MARK = "<!-- What follows is written by benchmarks.papers.run. -->\n"


def compute(name: str, mini: bool = False) -> frame.Paper:
    """Compute a paper's figures."""
    paper: frame.Paper = import_module(f"benchmarks.papers.{name}").paper(mini)
    return paper


def generated() -> str:
    """Return the page's end, from the JSON of all written papers."""
    paths = [frame.FOLDER / f"{name}.json" for name in MODULES]
    papers = [frame.read(path) for path in paths if path.exists()]
    return "\n".join([f"{MARK}\n{frame.summary(papers)}\n", *(x.section() for x in papers)])


def main() -> int:
    """Compute papers, print them, write their files and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("papers", nargs="*", default=[*MODULES], help=", ".join(MODULES))
    parser.add_argument("--no-write", action="store_true", help="only print: write no files")
    options = parser.parse_args()
    if unknown := set(options.papers) - {*MODULES}:
        parser.error(f"papers must be of {', '.join(MODULES)}; got {', '.join(sorted(unknown))}")
    for name in options.papers:
        paper = compute(name)
        if not options.no_write:
            frame.write(paper)
        print(paper.section(), flush=True)
    if not options.no_write:
        head, _, _ = PAGE.read_text().partition(MARK)
        PAGE.write_text(f"{head}{generated()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
