"""Write the page of compositions from marks of tests: `python docs/site/compositions.py`.

A test that runs kinds of parallelism together has the mark `composes`, once for each combination:

    @pytest.mark.composes("PyTorch", "the rule", case="tp", context=2, tensor=2, equal="gradients")

The arguments are those of `Row`. The numbers of ranks are given by the names of the kinds. The
combinations without a test are in `WITHOUT_TEST`.
"""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/compositions.md"
KINDS = {  # what the ranks of each kind divide
    "context": "the tokens of each document, by a [strategy](../strategies/index.md) of seqpar",
    "data": "the rows, or the documents, of a batch",
    "FSDP": "parameters, gradients and the optimizer's state. FSDP adds no ranks: it shards "
    "over data ranks, context ranks, or both. A row says over how many ranks",
    "tensor": "heads, and hidden units of MLPs",
    "pipeline": "layers",
    "expert": "experts of mixture-of-experts layers. Expert parallelism adds no ranks: each of its "
    "ranks also belongs to a different kind",
    "servers": "attention: trainers send it to [attention servers](../guides/servers.md)",
}
DIMENSIONS = "pipeline", "data", "context", "tensor"
GUIDES = {
    "PyTorch": "../guides/parallelism.md",
    "transformers": "../guides/huggingface_rules.md#ddp-fsdp-and-deepspeed",
    "Trainer and TRL": "../guides/huggingface.md#trainer",
    "accelerate": "../guides/huggingface.md#accelerate",
    "torchtitan": "../guides/torchtitan.md",
    "NeMo Automodel": "../guides/automodel.md",
    "Megatron-Core": "../guides/megatron.md",
    "verl": "../guides/verl.md",
}
NO_POOL = "the integration takes a process group or a mesh, and no pool of servers"
# For each framework, what has no test beside context parallelism, and why.
WITHOUT_TEST = {
    "transformers": {
        "pipeline": "transformers has no schedules for pipelines",
        "expert": "each rank holds all experts in our tests",
    },
    "Trainer and TRL": {
        "tensor": "our tests of trainers do not use tensor parallelism",
        "pipeline": "the Trainer has no pipelines",
        "expert": "each rank holds all experts in our tests",
        "servers": NO_POOL,
    },
    "accelerate": {
        "tensor": "our tests leave `tp_size` of `ParallelismConfig` at 1",
        "pipeline": "`ParallelismConfig` has no pipelines",
        "expert": "`ParallelismConfig` has no expert parallelism",
        "servers": NO_POOL,
    },
    "torchtitan": {
        "FSDP": "torchtitan 0.3.0 requires a later version of torch for FSDP",
        "pipeline": "our tests train without pipelines",
        "expert": "our tests train a model without experts",
        "servers": NO_POOL,
    },
    "NeMo Automodel": {
        "expert": "our tests train models without experts",
        "servers": NO_POOL,
    },
    "Megatron-Core": {
        "FSDP": "our tests use Megatron's `DistributedDataParallel`",
        "servers": NO_POOL,
    },
    "verl": {
        "tensor": "verl's FSDP engines have no tensor parallelism",
        "pipeline": "verl's FSDP engines have no pipelines",
        "expert": "verl's FSDP engines have no expert parallelism",
        "servers": NO_POOL,
    },
}
HEAD = """# Which parallelisms go together

These tables show which kinds of parallelism train together with seqpar's attention, in which
framework, and what you have to do in your program. The rows are made from marks of the tests: a row
says **tested** only if a test runs this combination. The guide [FSDP2, tensor parallelism,
pipelines](../guides/parallelism.md) shows a whole program.
"""
MEANINGS = {
    "tested": "a test runs the combination, and compares the quantities that the row names with "
    "the quantities of one process",
    "not run": "there is a test, but it has not run yet, because it needs more GPUs than we had",
    "refused": "seqpar raises an error before anything is computed. The row quotes words of this "
    "error, and the rule says what to do instead",
    "no test": "nobody has checked the combination. It may be right, wrong or impossible. The rule "
    "says why there is no test",
}
BELOW = """
"2 context × 2 tensor" means 4 ranks: the tokens of each document are divided among 2 ranks, and the
heads of each token among 2 ranks. Most combinations are tested with only one or two strategies,
because a strategy depends only on its own group and on the heads of its rank. Some rows name a
package or GPUs that a test needs. The test is skipped on machines without this package or these
GPUs.
"""
PAIRS = """
## Pairs

Each cell shows the best result of all combinations that contain both kinds. The results, from best
to worst, are tested, not run, refused, and no test. The cell links to a row with this result, in
plain PyTorch if there is such a row, and otherwise in a framework.

"""
FRAMEWORKS = """
## Frameworks

Each cell shows the best result of all combinations that the framework has with context parallelism
and the kind of the column. The column "servers" is an exception: its combinations need not contain
context parallelism, because servers replace it.

"""


@dataclasses.dataclass
class Row:
    """A combination of kinds of parallelism in a framework.

    Attributes:
        framework: a key of `GUIDES`.
        rule: what a user has to do, or what to do instead of a refused combination.
        ranks: the number of ranks of each kind. A kind that a row without a test names has 0 ranks.
        case: the id of the test's row, or "" for all rows of the test.
        equal: what equals one process.
        refused: words of the error, if the combination is refused.
        needs: what the test needs in addition to the usual packages.
        has_run: False if the test needs what nobody has had.
        file, test: where the test is. Both are "" without a test.
    """

    framework: str
    rule: str
    ranks: dict[str, int]
    case: str = ""
    equal: str = ""
    refused: str = ""
    needs: str = ""
    has_run: bool = True
    file: str = ""
    test: str = ""
    anchor: str = ""

    @property
    def result(self) -> str:
        if not self.test:
            return "no test"
        if not self.has_run:
            return "not run"
        return "refused" if self.refused else "tested"

    @property
    def combination(self) -> str:
        named = {name: f"{n} {name}" if n else name for name, n in self.ranks.items()}
        parts = [" × ".join(named[x] for x in DIMENSIONS if x in named)]
        for kind, words in (("FSDP", "FSDP"), ("expert", "experts")):
            if n := self.ranks.get(kind):
                parts.append(f"{words} over {n} ranks")
            elif kind in self.ranks:
                parts.append(words)
        if "servers" in named:
            parts.append("1 server" if self.ranks["servers"] == 1 else named["servers"])
        return ", ".join(x for x in parts if x)


def page() -> str:
    """Return the page."""
    rows = [*marked(), *without_test()]
    name_anchors(rows)
    parts = [HEAD, legend("kind", "what its ranks divide", KINDS)]
    parts += [legend("result", "what it means", MEANINGS), BELOW]
    parts += [PAIRS, pairs(rows), FRAMEWORKS, frameworks(rows)]
    for framework, guide in GUIDES.items():
        parts.append(f"\n## {framework}\n\nGuide: [{framework}]({guide}).\n\n")
        parts.append("| combination | result | rule | test |\n|---|---|---|---|\n")
        parts += [line(row) for row in rows if row.framework == framework]
    return "".join(parts)


def legend(name: str, head: str, meanings: dict[str, str]) -> str:
    lines = "".join(f"| {word} | {meaning} |\n" for word, meaning in meanings.items())
    return f"\n| {name} | {head} |\n|---|---|\n{lines}"


def marked() -> list[Row]:
    """Return the rows of all tests with marks, in the order of the page."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    rows = [row for file in files for row in rows_of(file)]
    return sorted(rows, key=order)


def order(row: Row) -> tuple[object, ...]:
    """Return what rows are sorted by: framework, result, kinds, and how much a test compares."""
    kinds = sorted(list(KINDS).index(kind) for kind in row.ranks)
    of_parts = "gradients" not in row.equal and "weights" not in row.equal
    return list(GUIDES).index(row.framework), row.result != "tested", len(kinds), kinds, of_parts


def rows_of(file: Path) -> Iterator[Row]:
    """Yield the rows of the marks in a file."""
    for node in ast.walk(ast.parse(file.read_text())):
        for mark in getattr(node, "decorator_list", ()):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.composes":
                framework, rule = (ast.literal_eval(x) for x in mark.args)
                given = {str(x.arg): ast.literal_eval(x.value) for x in mark.keywords}
                ranks = {kind: given.pop(kind) for kind in KINDS if kind in given}
                where = str(file.relative_to(ROOT))
                yield Row(framework, rule, ranks, file=where, test=node.name, **given)


def without_test() -> Iterator[Row]:
    for framework, kinds in WITHOUT_TEST.items():
        for kind, reason in kinds.items():
            beside = {} if kind == "servers" else {"context": 0}
            yield Row(framework, reason, beside | {kind: 0})


def name_anchors(rows: list[Row]) -> None:
    """Give each row an anchor: its framework and kinds, and a number if several have these."""
    counts: dict[str, int] = {}
    for row in rows:
        name = "-".join([row.framework, *row.ranks]).lower().replace(" ", "-")
        counts[name] = counts.get(name, 0) + 1
        row.anchor = name if counts[name] == 1 else f"{name}-{counts[name]}"


def pairs(rows: list[Row]) -> str:
    """Return the table of pairs of kinds."""
    lines = [f"| | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|"]
    for kind in KINDS:
        cells = [cell(rows, {kind, other}) if other != kind else "" for other in KINDS]
        lines.append(f"| **{kind}** | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def frameworks(rows: list[Row]) -> str:
    """Return the table of what each framework combines with context parallelism."""
    kinds = [kind for kind in KINDS if kind != "context"]
    lines = [f"| | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for framework in GUIDES:
        own = [row for row in rows if row.framework == framework]
        needed = [{kind} if kind == "servers" else {kind, "context"} for kind in kinds]
        lines.append(f"| **{framework}** | {' | '.join(cell(own, x) for x in needed)} |")
    return "\n".join(lines) + "\n"


def cell(rows: list[Row], kinds: set[str]) -> str:
    """Return the best result of the rows that have these kinds, with a link to the row."""
    found = [row for row in rows if kinds <= row.ranks.keys()]
    if not found:
        raise ValueError(f"a row must have {sorted(kinds)}: mark a test, or add to WITHOUT_TEST")
    results = list(MEANINGS)
    first = next(iter(GUIDES))
    best = min(
        found, key=lambda row: (results.index(row.result), row.framework != first, len(row.ranks))
    )
    return f"[{best.result}](#{best.anchor})"


def line(row: Row) -> str:
    """Return a row of the table of a framework."""
    result = row.result
    if row.equal:
        result += f": {row.equal}"
    elif row.refused:
        result += f": `{row.refused}`"
    test = ""
    if row.test:
        test = f"[{row.test}](../../{row.file})"
        test += f", `{row.case}`" if row.case else ""
        test += f"; needs {row.needs}" if row.needs else ""
    rule = row.rule.replace("|", "\\|")
    return f'| <a id="{row.anchor}"></a>{row.combination} | {result} | {rule} | {test} |\n'


if __name__ == "__main__":
    PAGE.write_text(page())
